"""``outblas report``: a self-contained HTML page from a run or a result file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import out
from outblas.core.errors import UsageError


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory (from `outblas tune` or `evolve`) or result file (from `outblas bench` or `compare`)."
        ),
    ],
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file to write (default: RUN/report.html, or RESULT.html for RESULT.parquet)."),
    ] = None,
) -> None:
    """Write an HTML report with speedups, heat maps, a roofline and losses, or with a comparison of agents."""
    from outblas_lab.publish.html.tune_page import check_page, write_report

    if not run.exists():
        raise UsageError(f"{run} does not exist", "a run directory, or a result file (Parquet)", "correct the path")
    path = out_file or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    common.output_file("--out", path, "report", check_page)
    write_report(run, path)
    out.print(f"report: {path}", markup=False)
    common.print_result("report", {"report": path})
