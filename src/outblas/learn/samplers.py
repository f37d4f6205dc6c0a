"""Draw the next problem of an agent's training: from a grid, from real layers, or log-uniform over all extents."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from outblas.core.errors import UsageError, unknown_name
from outblas.core.problem import Problem
from outblas.core.suites import GRID_EXTENTS, suite

#: Draws a problem.
Sampler = Callable[[random.Random], Problem]
SAMPLERS = ("grid", "llm", "log-uniform")


def sampler(
    name: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32", among: Sequence[Problem] | None = None
) -> Sampler:
    """Return a sampler by name.

    ``grid`` and ``llm`` draw from the suites with equal chance. ``log-uniform`` draws each extent log-uniformly between
    the grid's ends, so that no agent can memorise a list of shapes.

    Args:
        name: ``grid``, ``llm`` or ``log-uniform``.
        layout: layout of drawn problems.
        dtype: dtype of drawn problems.
        acc: accumulator of drawn problems.
        among: available problems (of a recording, or of a training split). A drawn problem becomes the nearest of them
            by the sum of |log2| ratios of extents; equal layouts and types come first. None: any problem.

    Raises:
        UsageError: the name is unknown, or ``among`` is empty.
    """
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, SAMPLERS, "pass one of them")
    if among is not None and not among:
        raise UsageError("no problem to draw from", "at least one", "name more problems")
    if name == "log-uniform":
        draw: Sampler = _log_uniform(layout, dtype, acc)
    else:
        listed = suite("grid1000" if name == "grid" else "llm", layout, dtype, acc)
        if among is not None:
            allowed = set(among)
            listed = [p for p in listed if p in allowed] or list(among)
        draw = lambda rng: rng.choice(listed)  # noqa: E731
    if among is None:
        return draw
    had, known = list(among), set(among)

    def nearest(rng: random.Random) -> Problem:
        wanted = draw(rng)
        return wanted if wanted in known else min(had, key=lambda p: problem_distance(p, wanted))

    return nearest


def _log_uniform(layout: str, dtype: str, acc: str) -> Sampler:

    def draw(rng: random.Random) -> Problem:
        m, n, k = (log_uniform(rng, GRID_EXTENTS[0], GRID_EXTENTS[-1]) for _ in range(3))
        return Problem(m, n, k, layout, dtype, acc)  # type: ignore[arg-type]

    return draw


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Return a whole number from ``low`` to ``high`` whose logarithm is uniform.

    Args:
        low: the least number, 1 or more.
        high: the greatest number.
    """
    return round(2 ** rng.uniform(math.log2(low), math.log2(high)))


def problem_distance(one: Problem, other: Problem) -> tuple[int, float]:
    """Return how far apart two problems are: differences of layout, dtype and accumulator, then that of the extents.

    The second number is the sum of |log2| of the ratios of M, N and K. Equal problems give (0, 0.0).
    """
    types = sum(getattr(one, field) != getattr(other, field) for field in ("layout", "dtype", "acc"))
    pairs = ((one.m, other.m), (one.n, other.n), (one.k, other.k))
    return types, sum(abs(math.log2(a / b)) for a, b in pairs)
