"""Agents that learn nothing, as a reference for the others."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.tune.agents.base import Agent, FixedOrder, unexplored


class RandomSearch(Agent):
    """Uniform random sampling without replacement.

    The draw depends on the seed, the problem and the length of the history. If fewer than ``n`` are left, it proposes
    them all.
    """

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        return self.rng(problem, history).sample(left, min(n, len(left)))


class RandomLegal(RandomSearch):
    """Uniform random sampling of every legal candidate, those that a model ruled out included.

    The other agents of a comparison draw from what a ranking model left in the recording, so they begin with its
    knowledge. On a live GPU it is the same as :class:`RandomSearch`.
    """

    every_legal = True


class Exhaustive(FixedOrder):
    """Every candidate in catalogue order.

    It proposes the first untried candidates in the order in which they are offered. With a budget that covers all
    candidates, the result is the true best.
    """

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        return list(candidates)
