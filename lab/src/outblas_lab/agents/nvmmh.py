"""Candidates in the order in which nvMatmulHeuristics would try them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.matmul_heuristics import ranked_choices
from outblas.kernels.families.family import TileChoice
from outblas.kernels.families.registry import FAMILIES
from outblas.tune.agents.base import FixedOrder, group_by_launch, interleave

#: Choices asked for each problem; the package has fewer for most.
CHOICES = 64
#: Added distance of a candidate of another family than wgmma from any choice.
FOREIGN = 4.0


class HeuristicsAgent(FixedOrder):
    """NVIDIA nvMatmulHeuristics: nearest candidates to its choices first.

    Each launch option has an order of its own, and the options take turns. In an order, each choice takes the nearest
    candidate that is still free. The other candidates follow by their distance to the first choice.

    The distance sums the absolute log2 ratios of bm, bn, bk, both cluster extents and split_k, and half that of the
    stages. A family without clusters has extents of 1. A family without stages counts its ``unroll``. The choices are
    wgmma kernels; a candidate of another family is 4 (:data:`FOREIGN`) further away. Other knobs do not count: ties
    keep the candidates' order. Without a choice, candidates keep their order within each launch option. That is so for
    a GPU that it does not know.
    """

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._known: dict[Problem, list[TileChoice]] = {}

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        """Return configs as :meth:`FixedOrder.whole_order` does.

        Raises:
            ToolchainMissing: nvMatmulHeuristics is not installed.
        """
        if problem not in self._known:
            self._known.update(ranked_choices([problem], self.gpu, CHOICES))
        orders = [_order(group, self._known[problem]) for group in group_by_launch(candidates)]
        return interleave(*orders)


def _order(candidates: Sequence[KernelConfig], choices: Sequence[TileChoice]) -> list[KernelConfig]:
    if not candidates or not choices:
        return list(candidates)
    positions = np.stack([_place_of_config(config) for config in candidates])
    foreign = FOREIGN * np.array([not FAMILIES[config.family].follows_heuristics for config in candidates])
    distances = {choice: np.abs(positions - _place(choice)).sum(axis=1) + foreign for choice in choices}
    taken: list[int] = []
    for choice in choices[: len(candidates)]:
        distance = distances[choice].copy()
        distance[taken] = np.inf
        taken.append(int(distance.argmin()))
    by_first = distances[choices[0]].argsort(kind="stable")
    return [candidates[i] for i in (*taken, *(int(i) for i in by_first if i not in taken))]


def _place(choice: TileChoice) -> NDArray[np.float64]:
    """Return float64[7]: scaled logarithms; the distance is the sum of their absolute differences."""
    extents = (choice.bm, choice.bn, choice.bk, choice.cluster_m, choice.cluster_n, choice.split_k)
    return np.array([*(math.log2(max(1, x)) for x in extents), math.log2(max(1, choice.stages)) / 2])


def _place_of_config(config: KernelConfig) -> NDArray[np.float64]:
    """Return float64[7] of a candidate, as :func:`_place` does.

    Families without clusters have cluster extents of 1; without stages, their ``unroll`` is used.
    """
    stages = int(getattr(config, "stages", 0) or getattr(config, "unroll", 1))
    cluster = getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)
    return _place(TileChoice(config.bm, config.bn, config.bk, stages, config.split_k, *cluster, order=0))
