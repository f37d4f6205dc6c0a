"""Which problem the next question is about: tries in proportion to what is left to the floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

#: A gap of less than this (log of time / floor) is closed: nothing more is asked.
CLOSED = math.log(1.02)


def gap(best_us: float | None, floor_us: float) -> float:
    """log of the best known time over the floor; 1 where no time is known."""
    return 1.0 if best_us is None else max(0.0, math.log(best_us / floor_us))


def next_problem(gaps: Mapping[str, float], tries: Mapping[str, int]) -> str | None:
    """The problem of the next try: largest gap / (tries + 1), the first of equal ones; None where all gaps are closed.

    These are D'Hondt's divisors: however many tries there are, they are shared out by the gaps.

    Args:
        gaps: problem key -> :func:`gap`. tries: chains begun so far.
    """
    open_gaps: Iterable[str] = [key for key, value in gaps.items() if value >= CLOSED]
    return max(open_gaps, key=lambda key: gaps[key] / (tries.get(key, 0) + 1), default=None)
