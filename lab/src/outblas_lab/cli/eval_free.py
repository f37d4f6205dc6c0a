"""``outblas eval --file``: prove and time a free kernel, or compile it where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import typer

from outblas.cli import common
from outblas.cli.eval import answer
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.runtime.device import gpu_count, require_gpus
from outblas_lab.jail.confinement import report
from outblas_lab.pool.eval_file import eval_file


def eval_free(problem: Problem, file: Path, base_dir: Path, gpu_index: int, json_out: bool) -> None:
    """Evaluate a free kernel. Exit with 2 unless it passed, or compiled on a machine without a GPU."""
    live = gpu_count() > 0
    if live:
        for line in report():
            common.err.print(f"jail: {line.part}: {line.words}", markup=False)
        require_gpus((gpu_index,))
    with common.err.status(f"{problem.key}: compiling{', proving, timing' if live else ''} ..."):
        result = eval_file(problem, file, gpu_index if live else None, base_dir)
    answer(problem, result, json_out)
    if result["status"] not in (Status.PASSED.value, Status.LEFT_OUT.value):
        raise typer.Exit(common.EXIT_ERROR)
