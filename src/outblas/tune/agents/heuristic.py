"""Candidates in the order in which the analytic model ranks them, launch options in turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.tune.agents.base import FixedOrder, group_by_launch, interleave


class Heuristic(FixedOrder):
    """Analytic cost model: fastest predicted candidate first.

    Launch options take turns (``plain``, ``pdl``, ``weights``), since a library row needs a winner of each. PDL is
    nearly always predicted faster; a single order would hide the others under a small budget. Equal predictions keep
    the order of the candidates. The measurements of the problem change nothing. The packaged model ranks; it was
    fitted on all measurements.
    """

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        ranked = [candidates[i] for i in self.rank(problem, candidates)]
        return interleave(*group_by_launch(ranked))

    def rank(self, problem: Problem, candidates: Sequence[KernelConfig]) -> np.ndarray:
        """Return the indices of the candidates, the fastest predicted one first."""
        from outblas.kernels.cost.cost_model import rank

        return rank(problem, candidates, self.gpu)
