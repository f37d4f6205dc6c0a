"""Student's t, for intervals of few samples."""

from __future__ import annotations

import math


def student_t(freedom: int) -> float:
    """Return t of Student's distribution for a two-sided interval of 95%.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4. Example: 12.706 for 1.

    Args:
        freedom: degrees of freedom, from 1 on.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability that abs(t) is below tan(angle) * sqrt(freedom)."""
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (step - 1) / step
        total += term
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total
