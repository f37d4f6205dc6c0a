"""Build a library table by table: add, replace and merge rows, and compare them with a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.core.workload import workload_of_mode
from outblas.records.library import Library
from outblas.records.library_merge import replace_intervals, replace_weights
from outblas.records.library_row import LibraryInterval, LibraryRow
from outblas.records.result_rows import launch_of_row
from outblas.records.results import read_result

#: What tells two searches of a table apart; date and commit do not, for a search goes on after an interruption.
_OF_A_SEARCH = ("kernels", "gpu", "driver", "toolchain")
#: Counts of a table's weights, which only the newest search knows.
_COUNTS = ("weights", "wanted")


def with_table_rows(library: Library, rows: Sequence[LibraryRow], table: Table, measured: dict[str, Any]) -> Library:
    """Return the library with more rows.

    Args:
        measured: provenance of the table; must have ``gpu``, ``driver``, ``toolchain``, ``date`` and ``commit``.
    """
    provenance = _with_part(library, "tables", table, measured)
    return replace(library, rows=(*library.rows, *rows), provenance=provenance)


def with_intervals(
    library: Library, intervals: Sequence[LibraryInterval], table: Table, measured: dict[str, Any]
) -> Library:
    """Return the library with the intervals of a table's weights. They win where it has intervals of the same M.

    It may keep intervals of the table that another search made, with other sources, GPU, driver or toolchain. The
    table's provenance then has that of the other search as ``earlier``.
    """
    merged = replace_intervals(library.intervals, intervals)
    measured = _with_earlier(library.provenance.get("intervals", {}), merged, intervals, table, measured)
    return replace(library, intervals=merged, provenance=_with_part(library, "intervals", table, measured))


def with_gates(library: Library, gates: Sequence[LibraryInterval], table: Table, measured: dict[str, Any]) -> Library:
    """Return the library with the gates of a table's weights, in place of those that it has of the same weights."""
    merged = replace_weights(library.gates, gates)
    measured = _with_earlier(library.provenance.get("gates", {}), merged, gates, table, measured)
    return replace(library, gates=merged, provenance=_with_part(library, "gates", table, measured))


def _with_earlier(
    parts: Mapping[str, Any], merged: Sequence[LibraryInterval], new: Sequence[LibraryInterval], table: Table,
    measured: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the provenance of a table's part after a search, with that of the search whose intervals it keeps."""
    weights, known = {Weight.of(problem) for problem in table.problems()}, dict(parts.get(str(table), {}))
    if all(one in new for one in merged if one.weight in weights):
        return measured
    # A search that goes on is still the same one. A proof says nothing of what is added after it.
    is_same = "proved" not in known and all(known.get(key) == measured.get(key) for key in _OF_A_SEARCH)
    earlier = known.get("earlier") if is_same else {k: v for k, v in known.items() if k not in _COUNTS}
    return {**measured, "earlier": earlier} if earlier else measured


def _with_part(library: Library, kind: str, table: Table, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the library's provenance with a table's part of a kind: ``tables``, ``intervals`` or ``gates``."""
    known = {"tables": {}, **library.provenance}
    where = {key: measured[key] for key in ("gpu", "driver", "toolchain", "date", "commit")}
    parts = {**known.get(kind, {}), str(table): measured}
    return {**known, **where, "command": "outblas build-library", kind: parts}


def replace_rows(library: Library, rows: Sequence[LibraryRow], table: Table, about: dict[str, Any]) -> Library:
    """Return the library with other rows for some of its problems, and another provenance of their table.

    Args:
        rows: the new rows. A row of a problem that is not in the library is ignored.
    """
    new = {row.problem: row for row in rows}
    merged = tuple(new.get(row.problem, row) for row in library.rows)
    return with_table_rows(replace(library, rows=merged), (), table, about)


def rows_of_table(library: Library, table: Table) -> Library:
    """Return a library with the rows of one table only. Its hash does not depend on other tables.

    Raises:
        UsageError: the table was not tuned, or not completely.
    """
    part = library.restricted_to(table.problems())
    if str(table) not in library.provenance["tables"] or len(part.rows) < len(table.problems()):
        raise UsageError(f"table {table} is not fully tuned", "a tuned table", "run step `tune` for this table first")
    return replace(part, provenance=library.provenance["tables"][str(table)])


def kernels_since(library: Library) -> str:
    """Return the date from which on figures are of the library's kernels, ISO 8601; empty if it is not known.

    It is the earliest date of a table that was searched with the library's kernel sources. A table that was searched
    with others names these as ``kernels`` in its provenance.
    """
    common, tables = library.provenance.get("kernels"), library.provenance.get("tables", {}).values()
    dates = [about["date"] for about in tables if about.get("date") and about.get("kernels", common) == common]
    return min(dates, default="") if common else ""


def is_bench_of(path: Path, library: Library, problems: Sequence[Problem]) -> bool:
    """Return whether a bench file is of exactly these problems and of the kernels that the library installs now.

    Raises:
        RecordError: the file is missing or damaged.
    """
    rows = read_result(path).rows
    if {Problem.from_json(row) for row in rows} != set(problems):
        return False
    for row in rows:
        found = library.lookup(Problem.from_json(row))
        kernel = found.kernel(launch_of_row(row), workload_of_mode(row["mode"])) if found is not None else None
        # A kernel that failed in the bench leaves no name there, but its status.
        failed = kernel is not None and row["fallback"] and row["status"] != Status.LEFT_OUT.value
        if not failed and row["config"] != ("" if kernel is None else config_name(kernel)):
            return False
    return True
