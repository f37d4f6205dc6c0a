"""``outblas eval --file``: prove and time a free kernel, or compile it where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import typer

from outblas.cli import common
from outblas.cli.eval import answer
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.runtime.device import gpu_count
from outblas_lab.jail.confinement import report
from outblas_lab.pool.eval_file import eval_file


def say_what_holds() -> None:
    """Print the limits that hold foreign code on this machine, and those that are absent."""
    for line in report():
        common.err.print(f"jail: {line.part}: {line.words}", markup=False)


def eval_free(problem: Problem, file: Path, base_dir: Path, device: str) -> None:
    """Evaluate a free kernel. Exit with 2 unless it passed, or compiled on a machine without a GPU."""
    gpu = common.gpu_index(device) if gpu_count() else None
    if gpu is not None:
        say_what_holds()
    with common.err.status(f"{problem.key}: compiling{', proving, timing' if gpu is not None else ''} ..."):
        result = eval_file(problem, file, gpu, base_dir)
    answer(problem, result)
    if result["status"] not in (Status.PASSED.value, Status.LEFT_OUT.value):
        raise typer.Exit(common.EXIT_ERROR)
