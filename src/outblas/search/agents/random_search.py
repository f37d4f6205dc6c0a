"""Two agents that learn nothing, as a reference for the others."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.search.agents.base import Agent, unexplored


class RandomSearch(Agent):
    """Uniform random sampling without replacement."""

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        return self.rng(problem, history).sample(left, min(n, len(left)))


class Exhaustive(Agent):
    """Every candidate in catalogue order.

    With a budget that covers all candidates, the result is the true best.
    """

    draws = False

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(candidates, history)[:n]
