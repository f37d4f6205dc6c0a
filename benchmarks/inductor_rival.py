"""Question: how fast is torch.compile's ``max-autotune`` on single products, beside ours and the baselines?

Command:

    python benchmarks/inductor_rival.py [--count 20] [--out results/<gpu>/inductor_rival.json]

Result file: results/<gpu>/inductor_rival.json; `tools/published_pages.py` puts a line of it under the published table.
Needs a GPU and Triton. Compiling takes most of the time; it is kept in
Inductor's own cache (``TORCHINDUCTOR_CACHE_DIR``).

``--count`` problems of suite grid1000 and as many of suite llm are taken (TN, fp16), stratified by regime. Inductor
times its Triton kernels and cuBLAS's call on each problem, and keeps the fastest. That is proved on the timed operands
and then timed in the same interleaved rounds as the library's plain kernel and every baseline. Inductor allocates its
result; in a captured graph that costs nothing. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures.rival_files import INDUCTOR_FORMAT
from rivals.fall_back import fall_back
from rivals.journaled_rows import journaled_rows
from rivals.timed_entries import time_entries

from outblas.core.config import config_name
from outblas.core.errors import OutblasError, ToolchainMissing
from outblas.core.evaluation import Status
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS, BaselineCall, fastest_baseline
from outblas.core.roofline import regime
from outblas.core.stats import geomean
from outblas.core.suites import sample, suite
from outblas.judge.baselines import make_baselines
from outblas.judge.reference import b_as_k_by_n
from outblas.judge.rounds import speedup
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

H200 = packaged_gpu("h200")

COUNT, SEED, ROUNDS = 20, 0, 11
NAME = "inductor"


class InductorProduct:
    """``torch.matmul`` compiled with ``max-autotune-no-cudagraphs``, for one problem.

    Args:
        stream: torch's stream of the clock. The first call compiles, so ``bind`` makes it there.
    """

    name = NAME

    def __init__(self, stream: Any) -> None:
        import torch

        torch._dynamo.reset()
        self._stream = stream
        self._product = torch.compile(torch.matmul, mode="max-autotune-no-cudagraphs", dynamic=False)

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that computes into memory of torch's own; ``c`` is not written."""
        import torch

        right = b_as_k_by_n(problem, b)

        def call(stream: int) -> None:
            with torch.cuda.stream(self._stream):
                self._product(a, right)

        call(0)
        return call

    def into(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that also copies the result to ``c``, for the proof."""
        import torch

        right = b_as_k_by_n(problem, b)

        def call(stream: int) -> None:
            with torch.cuda.stream(self._stream):
                c.copy_(self._product(a, right))

        return call


def problems_of(count: int) -> dict[str, list[Problem]]:
    """Return suite -> the problems that are timed."""
    return {name: sample(suite(name), count, SEED, gpu=H200) for name in ("grid1000", "llm")}


def measure_one(problem: Problem, row: LibraryRow | None, baselines: Mapping[str, Any], gpu: Any) -> dict[str, Any]:
    """Return the result of one problem."""
    from outblas.judge.gates import CellProver
    from outblas.judge.gpu_clock import GpuClock
    from outblas.runtime.kernel_loader import load_kernel

    choice = row.plain if row else None
    with GpuClock(problem, 0, seed=SEED + 1, gpu=gpu) as bench:
        prover = CellProver(bench.data, bench.torch_stream)
        entries: dict[str, Any] = dict(baselines)
        rival = InductorProduct(bench.torch_stream)
        verdict = prover.call(rival.into(problem, *bench.operands(0)))
        if verdict.status is Status.PASSED:
            entries[NAME] = rival
        if choice is None:
            entries["ours"] = fall_back(problem, row)
        else:
            entries["ours"] = load_kernel(problem, choice.config)[0]
            proved = prover.call(entries["ours"].bind(problem, *bench.operands(0)))
            if proved.status is not Status.PASSED:
                raise OutblasError(f"our kernel on {problem.key}: {proved.detail}", "one that is right", "look at it")
        timings = time_entries(bench, entries, ROUNDS, SEED)
    us = {name: timing.median_us for name, timing in timings.items()}
    best = fastest_baseline({name: us[name] for name in RIVALS if name in us})
    found = {"problem": problem.key, "regime": regime(problem, gpu), "baseline": best, "us": us}
    found["config"] = config_name(choice.config) if choice else None
    found["refused"] = None if NAME in timings else f"{verdict.status}: {verdict.detail}"
    for name in (NAME, "ours"):
        found[name] = dict(vars(speedup(timings, name, RIVALS))) if name in timings else None
    return found


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the geometric means over the fastest baseline, of rows on which Inductor's kernel passed.

    An older file has no figure of ours if the library falls back; ours counts as 1 then.
    """
    passed = [row for row in rows if row[NAME]]
    ours = [row["ours"]["ratio"] if row["ours"] else 1.0 for row in passed]
    theirs = [row[NAME]["ratio"] for row in passed]
    over = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {NAME: geomean(theirs), "ours": geomean(ours), "ours_over_inductor": geomean(over)}


def measure(count: int, out: Path) -> dict[str, Any]:
    """Time all problems that the journal does not have, and write the result file; return its content."""
    from outblas.runtime.device import gpu_of_device

    gpu = gpu_of_device(0)
    library, listed = Library.packaged(gpu.name), problems_of(count)
    todo = {_key(name, problem.key): (name, problem) for name, problems in listed.items() for problem in problems}
    settings = {"problems": [p.key for _, p in todo.values()], "rounds": ROUNDS, "library": library.sha()}
    result: dict[str, Any] = {}

    def rows_of(keys: list[str]) -> Iterator[dict[str, Any]]:
        baselines = make_baselines(0, RIVALS)
        for name, problem in map(todo.__getitem__, keys):
            yield {"suite": name, **measure_one(problem, library.lookup(problem), baselines, gpu)}

    def content(rows: list[dict[str, Any]]) -> dict[str, Any]:
        by_suite = {name: means([row for row in rows if row["suite"] == name]) for name in listed}
        about = collect_provenance(script_command("benchmarks/inductor_rival.py"))
        result.update({"format": INDUCTOR_FORMAT, "provenance": about, "means": by_suite, "rows": rows})
        return result

    journaled_rows(out, settings, list(todo), rows_of, _line, content, lambda row: _key(row["suite"], row["problem"]))
    return result


def _key(suite_name: str, problem: str) -> str:
    """Return the key of a row: a problem may be in both suites."""
    return f"{suite_name} {problem}"


def _line(row: dict[str, Any]) -> str:
    figures = [f"{name} {row[name]['ratio']:.3f}" for name in (NAME, "ours") if row[name]]
    return f"{row['problem']}: {', '.join(figures) or row['refused']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="problems of each suite")
    parser.add_argument("--out", type=Path, default=result_file("inductor_rival.json"))
    arguments = parser.parse_args()
    try:
        try:
            import triton  # noqa: F401
        except ImportError:
            raise ToolchainMissing("Triton is not installed", "torch.compile on a GPU", "pip install triton") from None
        result = measure(arguments.count, arguments.out)
    except OutblasError as error:
        sys.exit(f"error: {error}")
    for name, figures in result["means"].items():
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    print(f"result: {arguments.out}")


if __name__ == "__main__":
    main()
