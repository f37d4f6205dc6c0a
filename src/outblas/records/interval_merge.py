"""Combine intervals of two libraries: a new tuning run with an old file, or a user's library with the packaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from outblas.core.weight import Weight
from outblas.records.library_interval import IntervalIndex, LibraryInterval
from outblas.records.library_row import LibraryRow

#: Returns the decision where both libraries have one, from the row that goes first and the other row.
MergeRows = Callable[[LibraryRow, LibraryRow], LibraryRow]


def replace_intervals(old: Sequence[LibraryInterval], new: Sequence[LibraryInterval]) -> tuple[LibraryInterval, ...]:
    """Return the intervals of a file after a tuning run: those of the run, and what they leave of the old ones.

    The rest of an old interval with a kernel ends at measured M, because its kernels must be proved at both ends.

    Args:
        old: intervals of the file.
        new: intervals of the run. They win where both hold an M.
    """
    before, after = IntervalIndex(old), IntervalIndex(new)
    found: list[LibraryInterval] = []
    for weight in _weights(old, new):
        fresh = after.of_weight(weight)
        kept = [part for one in before.of_weight(weight) for part in _rest(one, fresh)]
        found += sorted([*kept, *fresh], key=lambda one: one.first)
    return tuple(found)


def replace_weights(old: Sequence[LibraryInterval], new: Sequence[LibraryInterval]) -> tuple[LibraryInterval, ...]:
    """Return the intervals of ``new``, and those of ``old`` for weights that ``new`` does not have."""
    taken = set(_weights(new))
    return (*(one for one in old if one.weight not in taken), *new)


def overlay_intervals(
    own: Sequence[LibraryInterval], packaged: Sequence[LibraryInterval], merge: MergeRows
) -> tuple[LibraryInterval, ...]:
    """Return the intervals by which a device decides: the user's, and the packaged ones in all other M.

    Args:
        own: intervals of the user's library.
        packaged: intervals of the packaged library.
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


def _rest(old: LibraryInterval, fresh: Sequence[LibraryInterval]) -> Iterator[LibraryInterval]:
    """Yield the parts of an old interval outside of the new ones of its weight, cut to measured ends."""
    first = old.first
    for taken in [*((one.first, one.last) for one in fresh), (old.last + 1, old.last + 1)]:
        last = min(old.last, taken[0] - 1)
        if first <= last:
            if (first, last) == (old.first, old.last):
                yield old
            elif not old.has_kernel:
                yield old.between(first, last)
            elif inside := [m for m in old.measured if first <= m <= last]:
                yield old.between(inside[0], inside[-1])
        first = max(first, taken[1] + 1)


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
