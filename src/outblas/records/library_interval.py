"""Intervals of M: one decision of a library for all products of a weight whose M lies in a range.

A weight's intervals do not overlap. So the interval of an M is found by a binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outblas.core.config import LAUNCHES, KernelConfig
from outblas.core.errors import ConfigError
from outblas.core.problem import Problem
from outblas.core.weight import Weight
from outblas.records.library_row import LibraryRow

_Key = tuple[int, int, str, str, str]


@dataclass(frozen=True)
class LibraryInterval:
    """The decision for all products of a weight with an M from ``first`` to ``last``.

    Attributes:
        row: the decision. Its problem is the one of the smallest M. The figures of each kernel are those of the
            measured M with the lowest lower bound.
        measured: each M at which the kernels were proved and timed, in rising order.
        owner: the library that holds the interval, in words, e.g. ``the user's library``. It is not saved.

    Raises:
        ConfigError: the range falls, or a measured M is outside of it, repeated or out of order.
    """

    row: LibraryRow
    last: int
    measured: tuple[int, ...] = ()
    owner: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where = f"interval M {self.first}..{self.last} of {self.weight.key}"
        if self.last < self.first:
            raise ConfigError(where, "a range of M that rises", "tune again")
        rising = all(a < b for a, b in pairwise(self.measured))
        if not rising or not all(self.first <= m <= self.last for m in self.measured):
            raise ConfigError(f"{where} was measured at M = {list(self.measured)}", "rising M inside it", "tune again")

    @property
    def weight(self) -> Weight:
        return Weight.of(self.row.problem)

    @property
    def first(self) -> int:
        """Return the smallest M."""
        return self.row.problem.m

    @property
    def kernels(self) -> list[KernelConfig]:
        """Return the kernels of all launch options; one may occur several times."""
        return [choice.config for launch in LAUNCHES if (choice := self.row.choice(launch)) is not None]

    @property
    def has_kernel(self) -> bool:
        """Return whether any launch option has a kernel."""
        return bool(self.kernels)

    @property
    def words(self) -> str:
        """Return the interval for a reader, e.g. ``interval M 65..512 of the user's library``."""
        return f"interval M {self.first}..{self.last} of {self.owner or 'the library'}"

    def row_for(self, problem: Problem) -> LibraryRow:
        """Return the decision as a row for a problem of the interval; its :attr:`LibraryRow.interval` is the interval.

        Args:
            problem: a product of the weight, whose M lies in the interval. This is not checked.
        """
        return replace(self.row, problem=problem, interval=self)

    def between(self, first: int, last: int) -> LibraryInterval:
        """Return the part from ``first`` to ``last``, both inside; ``measured`` keeps what lies in it."""
        measured = tuple(m for m in self.measured if first <= m <= last)
        row = replace(self.row, problem=self.weight.problem(first))
        return replace(self, row=row, last=last, measured=measured)


class IntervalIndex:
    """The intervals of a library, for look-ups by binary search.

    Args:
        intervals: the intervals; those of a weight in rising order of M.

    Raises:
        ConfigError: two intervals of a weight overlap, or stand in the wrong order.
    """

    def __init__(self, intervals: Iterable[LibraryInterval]) -> None:
        self._of: dict[_Key, tuple[list[int], list[LibraryInterval]]] = {}
        for one in intervals:
            firsts, kept = self._of.setdefault(_key(one.row.problem), ([], []))
            if kept and one.first <= kept[-1].last:
                before = f"M {kept[-1].first}..{kept[-1].last}"
                wrong = f"interval M {one.first}..{one.last} of {one.weight.key} follows {before}"
                overlap = one.last >= kept[-1].first
                expected = "intervals that do not overlap" if overlap else "intervals in rising order of M"
                raise ConfigError(wrong, expected, "tune again")
            firsts.append(one.first)
            kept.append(one)

    def find(self, problem: Problem) -> LibraryInterval | None:
        """Return the interval that holds a problem's M; None if no interval of its weight does."""
        firsts, kept = self._of.get(_key(problem), ((), ()))
        at = bisect_right(firsts, problem.m) - 1
        return kept[at] if at >= 0 and problem.m <= kept[at].last else None

    def of_weight(self, weight: Weight) -> list[LibraryInterval]:
        """Return the intervals of a weight in rising order of M, as a new list."""
        return list(self._of.get(_key(weight), ((), ()))[1])


def _key(one: Problem | Weight) -> _Key:
    """Return all of a problem but M; a tuple, which a new decision makes faster than a weight."""
    return one.n, one.k, one.layout, one.dtype, one.acc
