"""``outblas results``: the published summary, computed from the result files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import number, print_table, wants_json


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return summary rows as a ``rich.table.Table``, one line per row.

    Args:
        rows: rows of ``outblas_lab.publish.summary.summarise``. Required keys are ``suite``, ``layout``, ``dtype``,
            ``acc``, ``mode``, ``pdl``, ``early``, ``n``, ``geomean``, ``flop_weighted``, ``min``, ``losses`` and
            ``fallbacks``.

    Raises:
        KeyError: a row lacks one of them.
    """
    from rich.table import Table

    from outblas_lab.pool.averages import launch_label

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in ("suite", "layout, types", "mode", "PDL"):
        table.add_column(heading, no_wrap=True)
    for heading in ("n", "geomean", "by FLOP", "min", "losses", "fall-backs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        kind = f"{row['layout']} {row['dtype']}/{row['acc']}"
        figures = [number(row[key], 3) for key in ("geomean", "flop_weighted", "min")]
        counts = [str(row["losses"]), str(row["fallbacks"])]
        table.add_row(str(row["suite"]), kind, str(row["mode"]), launch_label(row), str(row["n"]), *figures, *counts)
    return table


def results(
    directory: Annotated[Path, typer.Option("--dir", help="Directory that contains the result files.")] = Path(
        "results", common.DEFAULT_RECORDING
    ),
) -> None:
    """Print a table that summarizes the committed result files, the source of every published number."""
    from outblas_lab.publish.summary import summary_rows

    rows = summary_rows(directory)
    print_table(summary_table(rows))
    if wants_json():
        from outblas_lab.cli.lab_documents import ResultsDocument

        common.print_document(ResultsDocument(rows=rows))
