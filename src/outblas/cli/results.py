"""``outblas results``: the published summary, computed from the result files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outblas.cli.common import EXIT_ERROR, err, number, out


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Summary rows (see ``outblas.results.summarise``) as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("suite", "layout", "dtype", "acc", "mode", "PDL"):
        table.add_column(heading)
    for heading in ("n", "geomean", "by FLOP", "min", "losses", "fall-backs"):
        table.add_column(heading, justify="right")
    for row in rows:
        words = [str(row[key]) for key in ("suite", "layout", "dtype", "acc", "mode")]
        figures = [number(row[key], 3) for key in ("geomean", "flop_weighted", "min")]
        counts = [str(row["losses"]), str(row["fallbacks"])]
        table.add_row(*words, "on" if row["pdl"] else "off", str(row["n"]), *figures, *counts)
    return table
