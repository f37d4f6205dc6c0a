"""Combine two libraries or rows: a new tuning run with an old file, or a user's library with the packaged one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from outblas.core.config import LAUNCHES
from outblas.core.weight import Weight
from outblas.core.workload import SECOND_WORKLOADS
from outblas.records.library import Library
from outblas.records.library_row import IntervalIndex, LibraryChoice, LibraryInterval, LibraryRow


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


def overlay_library(own: Library, packaged: Library) -> Library:
    """Return the library by which a device decides: the packaged one with the user's decisions in front.

    Rows of either library go before intervals of either. Where a row of the user has no kernel, that of a packaged row
    or of an interval is taken. Where a packaged row has none, that of an interval of the user is. The user's gates take
    the place of packaged ones of the same weight.
    """
    rows = {row.problem: row for row in packaged.rows}
    if own.intervals:
        rows = {problem: _filled(row, own.interval_index) for problem, row in rows.items()}
    merged = replace(packaged, intervals=overlay_intervals(own.intervals, packaged.intervals))
    for row in own.rows:
        rows[row.problem] = _filled(merge_user_row(row, rows.get(row.problem)), merged.interval_index)
    return replace(merged, rows=tuple(rows.values()), gates=replace_weights(packaged.gates, own.gates))


def _filled(row: LibraryRow, intervals: IntervalIndex) -> LibraryRow:
    """Return a row with the kernel of the interval that holds its M, for each launch option in which it has none."""
    interval = intervals.find(row.problem) if row.plain is None or row.pdl is None else None
    return row if interval is None else merge_user_row(row, interval.row_for(row.problem))


def merge_user_row(own: LibraryRow, packaged: LibraryRow | None) -> LibraryRow:
    """Return the user's decision, with the packaged kernel for each launch option in which the user's row has none.

    Packaged kernels are proven too, and a short search may have missed them. Second winners come from the row whose
    plain kernel is used.

    Args:
        packaged: another row of the same problem, packaged or of an interval; None makes the result ``own``.
    """
    if packaged is None:
        return own
    weights = own.weights or (None if own.pdl is not None else packaged.weights)
    first = packaged if own.plain is None and packaged.plain is not None else own
    seconds = {workload: getattr(first, workload) for workload in SECOND_WORKLOADS}
    return replace(own, plain=first.plain, pdl=own.pdl or packaged.pdl, weights=weights, **seconds)


def overlay_intervals(
    own: Sequence[LibraryInterval], packaged: Sequence[LibraryInterval]
) -> tuple[LibraryInterval, ...]:
    """Return the intervals by which a device decides: the user's, and the packaged ones in all other M."""
    first, second = IntervalIndex(own), IntervalIndex(packaged)
    found: list[LibraryInterval] = []
    for weight in _weights(own, packaged):
        pieces = list(_overlaid(weight, first, second))
        joined = pieces[:1]
        for piece in pieces[1:]:
            before = joined[-1]
            same = replace(piece.row, problem=before.row.problem) == before.row and piece.owner == before.owner
            if same and piece.first == before.last + 1:
                joined[-1] = replace(joined[-1], last=piece.last, measured=joined[-1].measured + piece.measured)
            else:
                joined.append(piece)
        found += joined
    return tuple(found)


def _weights(*lists: Iterable[LibraryInterval]) -> list[Weight]:
    """Return the weights of all intervals, each once, in their order."""
    return list(dict.fromkeys(one.weight for intervals in lists for one in intervals))


def _overlaid(weight: Weight, own: IntervalIndex, packaged: IntervalIndex) -> Iterator[LibraryInterval]:
    """Yield pieces of a weight's range that end at each end of an interval of either library."""
    both = (*own.of_weight(weight), *packaged.of_weight(weight))
    for first, after in pairwise(sorted({m for one in both for m in (one.first, one.last + 1)})):
        problem, last = weight.problem(first), after - 1
        mine, theirs = own.find(problem), packaged.find(problem)
        if mine is not None and theirs is not None:
            row = replace(merge_user_row(mine.row_for(problem), theirs.row_for(problem)), interval=None)
            yield replace(mine.between(first, last), row=row)
        elif (one := mine or theirs) is not None:
            yield one.between(first, last)


def merge_rows(old: LibraryRow, new: LibraryRow) -> LibraryRow:
    """Return, for each launch option, the kernel with the higher lower bound; ``old`` wins a tie.

    If any kernel changes, the baseline is that of ``new``. A row without a kernel loses to one with a kernel.
    """
    picks: dict[str, LibraryChoice | None] = {}
    for launch in LAUNCHES:
        a, b = old.choice(launch), new.choice(launch)
        picks[launch] = b if a is None or (b is not None and b.low > a.low) else a
    if picks["weights"] == picks["pdl"]:
        picks["weights"] = None
    if all(getattr(old, launch) == pick for launch, pick in picks.items()):
        return old
    row = replace(new, plain=picks["plain"], pdl=picks["pdl"], weights=picks["weights"])
    # Second winners were timed against the plain choice of their row, so they stay with it.
    return without_second_winners(row) if picks["plain"] != new.plain else row


def without_second_winners(row: LibraryRow) -> LibraryRow:
    """Return a row whose plain choice holds under every workload."""
    return replace(row, cold=None, single=None)
