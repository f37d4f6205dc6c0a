"""Draw the next measurements some problems ahead: agents think and compilers work while a GPU measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Generic, TypeVar

from outblas.core.problem import Problem

#: Most problems drawn ahead: their kernels are compiled (0.3 s) before they are needed. Number at a time: one
#: more than is used up meanwhile.
MAX_PROBLEMS_AHEAD, PROBLEMS_AT_A_TIME = 8, 2

_C = TypeVar("_C")


class Lookahead(Generic[_C]):
    """Groups of consecutive pairs (problem, candidate) with the same problem, drawn some groups ahead.

    :meth:`next` returns a group; :meth:`more` draws groups ahead. Nothing is drawn before the first of these calls. A
    problem that returns after another one makes a new group.

    Example: with the pairs (p, 1), (p, 2), (q, 3), the calls of :meth:`next` return ``[(p, 1), (p, 2)]``, ``[(q, 3)]``,
    then None.

    Args:
        pairs: the pairs, drawn lazily and never by two threads at once.
        drawn: function that is called once with each group, a list of pairs, at the moment when it is drawn. Its result
            is ignored.
    """

    def __init__(self, pairs: Iterable[tuple[Problem, _C]], drawn: Callable[[list[tuple[Problem, _C]]], None]) -> None:
        self._groups = groupby(pairs, key=lambda pair: pair[0])
        self._tell = drawn
        self._drawn: deque[list[tuple[Problem, _C]]] = deque()

    def next(self) -> list[tuple[Problem, _C]] | None:
        """Return the pairs of the next group, drawing it if it is not drawn yet; None after the last."""
        if not self._drawn:
            self._draw()
        return self._drawn.popleft() if self._drawn else None

    def more(self) -> None:
        """Draw up to two more groups, but no more than eight ahead of :meth:`next`. At the end of the pairs it does
        nothing.
        """
        for _ in range(min(PROBLEMS_AT_A_TIME, MAX_PROBLEMS_AHEAD - len(self._drawn))):
            self._draw()

    def _draw(self) -> None:
        for _, group in self._groups:
            listed = list(group)
            self._tell(listed)
            self._drawn.append(listed)
            return
