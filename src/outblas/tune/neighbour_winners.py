"""Candidates from nearby shapes, which the problem's own search may have missed.

Shapes a factor of two away need much the same kernel. Their winners are compiled and proved already, so that a try
costs its timing only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import log2

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import launch_options
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry_terms import WGMMA_ROWS
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.tune.agents.base import interleave

#: How far shapes are looked at: the sum over M, N, K of the factors between them, in powers of two.
MAX_LOG2_DISTANCE = 2.0
#: What a factor of two counts between rows that are all within one tile of wgmma.
WITHIN_A_TILE = 0.25
#: What swapping M and N adds to that distance.
SWAPPED = 0.25


def neighbour_winners(
    problem: Problem, won: Mapping[Problem, Mapping[Launch, KernelConfig]], known: Collection[KernelConfig], gpu: Gpu
) -> list[KernelConfig]:
    """Return legal configs outside ``known``: winners of nearby shapes, heaviest first, launch options in turns.

    Only options of :func:`outblas.kernels.catalogue.launch_options` for the problem count. A winner's weight is the sum
    of ``1 / (1 + distance)²`` over its shapes within :data:`MAX_LOG2_DISTANCE`. The distance is about the sum of the
    absolute log2 of the ratios of M, N and K. A shape with M and N swapped counts with its winner for the transposed
    product. The problem's own winners do not count; equal weights are in the order of names.

    Args:
        won: winners of problems of the same layout, dtype and accumulator, by :func:`winners`.
    """
    weights: dict[Launch, dict[KernelConfig, float]] = {launch: {} for launch in launch_options(problem, gpu)}
    for other, configs in won.items():
        for swapped in (False, True):
            m, n = (other.n, other.m) if swapped else (other.m, other.n)
            away = _rows_apart(problem.m, m) + _rows_apart(problem.n, n) + abs(log2(problem.k / other.k))
            away += SWAPPED if swapped else 0.0
            if other == problem or away > MAX_LOG2_DISTANCE:
                continue
            for launch in weights.keys() & configs.keys():
                config, by = configs[launch], weights[launch]
                config = FAMILIES[config.family].transposed(config) if swapped else config
                by[config] = by.get(config, 0.0) + 1 / (1 + away) ** 2
    turns = interleave(*(sorted(by, key=lambda c: (-by[c], config_name(c))) for by in weights.values()))
    return [c for c in dict.fromkeys(turns) if c not in known and why_illegal(problem, c, gpu) is None]


class LibraryNeighbours:
    """The winners of a library's rows and intervals of shapes nearby, of the same layout and accumulator."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._near: dict[Problem, list[tuple[LibraryRow, int]]] = {}

    def of(self, problem: Problem, gpu: Gpu) -> list[KernelConfig]:
        """Return the winners as :func:`neighbour_winners`, those of both dtypes.

        An interval counts at its M nearest to the problem's. Rows and intervals of the problem's M, N and K do not.
        """
        won: dict[Problem, dict[Launch, KernelConfig]] = {}
        key = replace(problem, m=1)
        if key not in self._near:
            self._near[key] = [
                (row, last)
                for row, last in self._entries()
                if (row.problem.layout, row.problem.acc) == (problem.layout, problem.acc)
                and (row.problem.n, row.problem.k) != (problem.n, problem.k)
                and _may_be_near(problem, row.problem)
            ]
        for row, last in self._near[key]:
            p = row.problem
            other = replace(problem, m=min(max(problem.m, p.m), last), n=p.n, k=p.k)
            choices = {launch: row.choice(launch) for launch in LAUNCHES}
            won.setdefault(other, {}).update({launch: one.config for launch, one in choices.items() if one})
        return neighbour_winners(problem, won, (), gpu)

    def _entries(self) -> Iterator[tuple[LibraryRow, int]]:
        yield from ((row, row.problem.m) for row in self._library.rows)
        yield from ((one.row, one.last) for one in self._library.intervals)


def _may_be_near(problem: Problem, other: Problem) -> bool:
    """Return whether K, and N or M as N, are within the largest distance."""
    left = MAX_LOG2_DISTANCE - abs(log2(problem.k / other.k))
    return min(_rows_apart(problem.n, other.n), _rows_apart(problem.n, other.m) + SWAPPED) <= left


def _rows_apart(one: int, other: int) -> float:
    """Powers of two between two extents of C; a small part of those within one tile, which ask for the same kernel."""
    tiles = abs(log2(max(one, WGMMA_ROWS) / max(other, WGMMA_ROWS)))
    return tiles + WITHIN_A_TILE * abs(log2(min(one, WGMMA_ROWS) / min(other, WGMMA_ROWS)))
