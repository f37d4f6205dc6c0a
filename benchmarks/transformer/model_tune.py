"""The products of a model's steps, tuned for the machine before these are timed: for model_steps.py.

What an engineer would do with a model of their own: ``outblas capture``, then ``outblas tune --captured``, whose
library goes before the packaged one. It is how the head gets a kernel, of a vocabulary that no packaged table has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from model_runs import Work
from step_rounds import Step

import outblas
from outblas.core.config import config_name
from outblas.core.errors import DeviceError
from outblas.records.captured_products import CapturedProducts
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.user_library import LIBRARY_VARIABLE
from outblas.tune.tune_run import RunFiles, provenance_of

#: Candidates measured of a problem, on average, where the time does not end before.
BUDGET = 64


def tuned(
    model: Any,
    steps: Sequence[Step],
    context: int,
    seconds: float,
    folder: Path,
    run: Callable[..., Any] = subprocess.run,
) -> dict[str, Any]:
    """Capture the products of the steps under torch alone, and tune them for ``seconds`` into a user library in
    ``folder``.

    This process uses that library from then on. Call it before OutBLAS runs its first product.

    Returns:
        For the result file: the time, the captured products, the rows of the library, and the provenance of their
        figures.

    Raises:
        DeviceError: the tuning failed; its words went to stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    captured, files, libraries = folder / "captured.json", RunFiles(folder / "run"), folder / "libraries"
    capture_steps(model, steps, context, captured)
    os.environ[LIBRARY_VARIABLE] = str(libraries)
    command = [
        sys.executable,
        "-m",
        "outblas",
        "tune",
        "--captured",
        str(captured),
        "--budget",
        f"{BUDGET},{seconds:g}s",
    ]
    command += ["--device", "cuda:0", "--run", str(files.path), "--install"]
    # A process of its own: the worker that times is the only other one to use the GPU meanwhile.
    if run(command, env=dict(os.environ), check=False).returncode:
        raise DeviceError(f"`{' '.join(command[1:])}` failed", "a library", "see its error above")
    library = Library.load(files.library)
    return {
        "seconds": seconds,
        "captured": {problem.key: count for problem, count in CapturedProducts.load(captured).problems().items()},
        "rows": [row_json(row) for row in library.rows],
        "provenance": provenance_of(files.path),
    }


def capture_steps(model: Any, steps: Sequence[Step], context: int, path: Path) -> None:
    """Write the products of the steps. Each step repeats as often as fits into the time of the longest.

    A step of one token thus counts as much as one of thousands.
    """
    seconds = {step: step_seconds(model, step, context) for step in steps}
    with outblas.capture(path, command="benchmarks/transformer/model_steps.py --tune"):
        for step in steps:
            work = Work(model, step, context)
            for _ in range(max(1, round(max(seconds.values()) / seconds[step]))):
                work.reset()
                work.run()
            work.close()


def step_seconds(model: Any, step: Step, context: int) -> float:
    """Of one run that is not the first, eager and by torch alone."""
    work = Work(model, step, context)
    for _ in range(2):
        work.reset()
        begin = perf_counter()
        work.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    seconds = perf_counter() - begin
    work.close()
    return seconds


def row_json(row: LibraryRow) -> Mapping[str, Any]:
    """Return a library row without PDL as JSON: kernel, speed-up and its interval, or the fall-back."""
    found = {"problem": row.problem.key, "baseline": row.baseline}
    if row.plain is None:
        return {**found, "kernel": None, "fallback": row.fallback}
    choice = row.plain
    return {**found, "kernel": config_name(choice.config), "speedup": [choice.speedup, choice.low, choice.high]}


def line(told: Mapping[str, Any]) -> str:
    """Return the tuned library in one line."""
    kernels = sum(row["kernel"] is not None for row in told["rows"])
    reached, asked = len(told["rows"]), len(told["captured"])
    return f"tuned for {told['seconds']:g} s: {reached} of {asked} products reached, {kernels} with a kernel of ours"
