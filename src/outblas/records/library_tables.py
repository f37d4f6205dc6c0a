"""Build a library table by table: add, replace and merge rows, and compare them with a bench."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from outblas.core.config import LAUNCHES, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.core.workload import workload_of_mode
from outblas.records.averages import launch_of_row
from outblas.records.library import Library
from outblas.records.library_row import IntervalIndex, LibraryChoice, LibraryInterval
from outblas.records.library_row import LibraryRow as LibraryRow
from outblas.records.results import read_result

#: What tells two searches of a table apart; date and commit do not, for a search goes on after an interruption.
_OF_A_SEARCH = ("kernels", "gpu", "driver", "toolchain")
#: Counts of a table's weights, which only the newest search knows.
_COUNTS = ("weights", "wanted")


def with_table_rows(library: Library, rows: Sequence[LibraryRow], table: Table, measured: dict[str, Any]) -> Library:
    """Return the library with more rows.

    Args:
        rows: rows of one table, not yet in the library.
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

    Args:
        measured: provenance of the intervals, as for :func:`with_table_rows`.
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
        raise UsageError(f"table {table} is not tuned", "a library with all its problems", "run step tune of it first")
    return replace(part, provenance=library.provenance["tables"][str(table)])


def kernels_since(library: Library) -> str:
    """Return the date from which on figures are of the library's kernels, ISO 8601; empty if it is not known.

    It is the earliest date of a table that was searched with the library's kernel sources. A table that was searched
    with others names these as ``kernels`` in its provenance.
    """
    common, tables = library.provenance.get("kernels"), library.provenance.get("tables", {}).values()
    dates = [about["date"] for about in tables if about.get("date") and about.get("kernels", common) == common]
    return min(dates, default="") if common else ""


def with_kernels(provenance: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a library's provenance in which a hash of kernel sources replaces one of equal kernels, tables included.

    Args:
        old: the hash that is replaced in each field ``kernels``.
        new: the hash that replaces it.
    """

    def renamed(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_kernels(value, old, new)
        return new if (key, value) == ("kernels", old) else value

    return {key: renamed(key, value) for key, value in provenance.items()}


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


def merge_rows(old: LibraryRow, new: LibraryRow) -> LibraryRow:
    """Return, for each launch option, the kernel with the higher lower bound; ``old`` wins a tie.

    If any kernel changes, the baseline is that of ``new``. A row without a kernel loses to one with a kernel.
    """
    picks: dict[str, LibraryChoice | None] = {}
    for launch in LAUNCHES:
        a, b = old.choice(launch), new.choice(launch)
        picks[launch] = b if a is None or (b is not None and b.low > a.low) else a
    return _with_choices(old, new, picks)


def fill_fallbacks(old: LibraryRow, new: LibraryRow) -> LibraryRow:
    """Return ``old`` with kernels of ``new`` for the launch options in which ``old`` has none.

    If any kernel is added, the baseline is that of ``new``.
    """
    return _with_choices(old, new, {launch: old.choice(launch) or new.choice(launch) for launch in LAUNCHES})


def _with_choices(old: LibraryRow, new: LibraryRow, picks: dict[str, LibraryChoice | None]) -> LibraryRow:
    """Return a row with these kernels and the baseline of ``new``; ``old`` itself if it already has these kernels.

    Second winners were timed against the plain choice of their row, so they stay with it.
    """
    if picks["weights"] == picks["pdl"]:
        picks = {**picks, "weights": None}
    if all(getattr(old, launch) == pick for launch, pick in picks.items()):
        return old
    row = replace(new, plain=picks["plain"], pdl=picks["pdl"], weights=picks["weights"])
    return without_second_winners(row) if picks["plain"] != new.plain else row


def without_second_winners(row: LibraryRow) -> LibraryRow:
    """Return a row whose plain choice holds under every workload."""
    return replace(row, cold=None, single=None)


#: Returns the decision where both libraries have one, from the row that goes first and the other row.
MergeRows = Callable[[LibraryRow, LibraryRow], LibraryRow]


def replace_intervals(old: Sequence[LibraryInterval], new: Sequence[LibraryInterval]) -> tuple[LibraryInterval, ...]:
    """Return the intervals of a file after a tuning run: those of the run, and what they leave of the old ones.

    The rest of an old interval with a kernel ends at measured M, because its kernels must be proved at both ends.

    Args:
        new: intervals of the run. They win where both hold an M.
    """
    before, after = IntervalIndex(intervals_outside(old, new)), IntervalIndex(new)
    found: list[LibraryInterval] = []
    for weight in _weights(old, new):
        found += sorted([*before.of_weight(weight), *after.of_weight(weight)], key=lambda one: one.first)
    return tuple(found)


def replace_weights(old: Sequence[LibraryInterval], new: Sequence[LibraryInterval]) -> tuple[LibraryInterval, ...]:
    """Return the intervals of ``new``, and those of ``old`` for weights that ``new`` does not have."""
    taken = set(_weights(new))
    return (*(one for one in old if one.weight not in taken), *new)


def intervals_outside(intervals: Sequence[LibraryInterval], taken: Sequence[LibraryInterval]) -> list[LibraryInterval]:
    """Return what some intervals leave of others. With a kernel, the parts end at measured M."""
    index = IntervalIndex(taken)
    spans = {weight: [(one.first, one.last) for one in index.of_weight(weight)] for weight in _weights(taken)}
    return [part for one in intervals for part in parts_outside(one, spans.get(one.weight, ()))]


def parts_outside(one: LibraryInterval, taken: Iterable[tuple[int, int]]) -> Iterator[LibraryInterval]:
    """Yield the parts of an interval outside of some spans of M. With a kernel, they end at measured M.

    Args:
        taken: (first, last) of each span, in rising order.
    """
    first = one.first
    for begin, end in (*taken, (one.last + 1, one.last + 1)):
        last = min(one.last, begin - 1)
        if first <= last:
            if (first, last) == (one.first, one.last):
                yield one
            elif not one.has_kernel:
                yield one.between(first, last)
            elif inside := [m for m in one.measured if first <= m <= last]:
                yield one.between(inside[0], inside[-1])
        first = max(first, end + 1)


def overlay_intervals(
    own: Sequence[LibraryInterval], packaged: Sequence[LibraryInterval], merge: MergeRows
) -> tuple[LibraryInterval, ...]:
    """Return the intervals by which a device decides: the user's, and the packaged ones in all other M.

    Args:
        merge: returns the decision for an M that both hold.
    """
    first, second = IntervalIndex(own), IntervalIndex(packaged)
    found: list[LibraryInterval] = []
    for weight in _weights(own, packaged):
        pieces = list(_overlaid(weight, first, second, merge))
        joined = pieces[:1]
        for piece in pieces[1:]:
            if _is_continued(joined[-1], piece):
                joined[-1] = replace(joined[-1], last=piece.last, measured=joined[-1].measured + piece.measured)
            else:
                joined.append(piece)
        found += joined
    return tuple(found)


def _weights(*lists: Iterable[LibraryInterval]) -> list[Weight]:
    """Return the weights of all intervals, each once, in their order."""
    return list(dict.fromkeys(one.weight for intervals in lists for one in intervals))


def _overlaid(
    weight: Weight, own: IntervalIndex, packaged: IntervalIndex, merge: MergeRows
) -> Iterator[LibraryInterval]:
    """Yield pieces of a weight's range that end at each end of an interval of either library."""
    both = (*own.of_weight(weight), *packaged.of_weight(weight))
    for first, after in pairwise(sorted({m for one in both for m in (one.first, one.last + 1)})):
        problem, last = weight.problem(first), after - 1
        mine, theirs = own.find(problem), packaged.find(problem)
        if mine is not None and theirs is not None:
            row = replace(merge(mine.row_for(problem), theirs.row_for(problem)), interval=None)
            yield replace(mine.between(first, last), row=row)
        elif (one := mine or theirs) is not None:
            yield one.between(first, last)


def _is_continued(before: LibraryInterval, piece: LibraryInterval) -> bool:
    """Return whether two neighbouring pieces have the same decision and owner and leave no M out."""
    same = replace(piece.row, problem=before.row.problem) == before.row and piece.owner == before.owner
    return same and piece.first == before.last + 1
