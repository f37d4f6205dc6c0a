"""Extents of problems: their distance, and random ones."""

from __future__ import annotations

import math
import random

from outblas.core.problem import Problem


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Return a whole number from ``low`` to ``high`` whose logarithm is uniform.

    Args:
        low: the least number, 1 or more.
    """
    return round(2 ** rng.uniform(math.log2(low), math.log2(high)))


def problem_distance(one: Problem, other: Problem) -> tuple[int, float]:
    """Return how far apart two problems are: differences of layout, dtype and accumulator, then that of the extents.

    The second number is the sum of |log2| of the ratios of M, N and K. Equal problems give (0, 0.0).
    """
    types = sum(getattr(one, field) != getattr(other, field) for field in ("layout", "dtype", "acc"))
    pairs = ((one.m, other.m), (one.n, other.n), (one.k, other.k))
    return types, sum(abs(math.log2(a / b)) for a, b in pairs)
