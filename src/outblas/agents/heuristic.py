"""Candidates in the order in which the analytic model ranks them."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.agents.base import Agent, unexplored
from outblas.config import KernelConfig
from outblas.evaluation import Evaluation
from outblas.problem import Problem


class Heuristic(Agent):
    """Fastest predicted first; equal predictions in catalogue order."""

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        from outblas.model import rank

        left = unexplored(candidates, history)
        return [left[i] for i in rank(problem, left, self.gpu)[:n]] if left else []
