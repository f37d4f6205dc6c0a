"""Candidates in the order in which the analytic model ranks them, launch options in turns."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.agents.base import Agent, by_launch, in_turns, unexplored
from outblas.config import KernelConfig
from outblas.evaluation import Evaluation
from outblas.problem import Problem


class Heuristic(Agent):
    """Fastest predicted first; equal predictions in catalogue order. A library row has a winner of every launch option,
    and PDL is nearly always predicted faster: by one order for all a small budget would hardly see the others."""

    draws = False

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        from outblas.model import rank

        if not candidates:
            return []
        ranked = [candidates[i] for i in rank(problem, candidates, self.gpu)]
        return unexplored(in_turns(*by_launch(ranked)), history)[:n]
