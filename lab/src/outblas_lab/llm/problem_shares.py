"""Share the tries of an evolution among its problems, in proportion to how far each is from its floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

#: A gap of less than this (log of time / floor) is closed: nothing more is asked.
CLOSED_GAP = math.log(1.02)


def log_gap(best_us: float | None, floor_us: float) -> float:
    """Return the natural log of (best known time / floor), at least 0; 1.0 if no time is known.

    Example: ``log_gap(4.0, 2.0)`` is log 2, about 0.693; ``log_gap(1.0, 2.0)`` is 0.0.

    Args:
        best_us: best known time, microseconds; None: none is known.
        floor_us: least plausible time, microseconds.
    """
    return 1.0 if best_us is None else max(0.0, math.log(best_us / floor_us))


def next_problem(gaps: Mapping[str, float], tries: Mapping[str, int]) -> str | None:
    """Return the key of the next try's problem: the largest gap / (tries + 1), the first of equals.

    A gap below the log of 1.02 is closed. Return None if all gaps are closed, or ``gaps`` is empty. These are D'Hondt's
    divisors, so tries are shared in proportion to the gaps.

    Example: ``next_problem({"a": 0.5, "b": 0.9}, {"b": 1})`` returns ``"a"``.

    Args:
        gaps: problem key -> :func:`log_gap`.
        tries: problem key -> chains begun so far; a missing key counts as 0.
    """
    open_gaps: Iterable[str] = [key for key, value in gaps.items() if value >= CLOSED_GAP]
    return max(open_gaps, key=lambda key: gaps[key] / (tries.get(key, 0) + 1), default=None)
