"""A second look at problems that were searched before: what was not tried, and what is near the best that was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outblas.agents.base import Agent, in_turns, unexplored
from outblas.config import KernelConfig
from outblas.evaluation import Evaluation, Status
from outblas.model import rank
from outblas.neighbours import neighbours
from outblas.problem import Problem
from outblas.roofline import Gpu, floor_us

#: Above this floor a launch is nothing, and nor is PDL.
PDL_IS_NOTHING_US = 25.0


class Untried(Agent):
    """The ranking model's order of what was not tried; launch options in turns, no PDL where a launch is nothing."""

    name = "untried"

    def __init__(self, seed: int, gpu: Gpu, tried: Mapping[Problem, set[KernelConfig]]) -> None:
        super().__init__(seed, gpu)
        self._tried = tried

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = [c for c in candidates if c not in self._tried[problem]]
        if not left:
            return []
        ranked = [left[i] for i in rank(problem, left, self.gpu)]
        turns = [[c for c in ranked if c.pdl is pdl] for pdl in launch_options(problem, self.gpu)]
        return unexplored(in_turns(*turns), history)[:n]


class InOrder(Agent):
    """The candidates as they are offered."""

    name = "in_order"

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(candidates, history)[:n]


def launch_options(problem: Problem, gpu: Gpu) -> tuple[bool, ...]:
    """PDL off and, where a launch is anything, on."""
    return (False,) if floor_us(problem, gpu) > PDL_IS_NOTHING_US else (False, True)


def tried_by_problem(evaluations: Iterable[Evaluation]) -> dict[Problem, list[Evaluation]]:
    """Evaluations of every problem, in their order."""
    found: dict[Problem, list[Evaluation]] = {}
    for evaluation in evaluations:
        found.setdefault(evaluation.problem, []).append(evaluation)
    return found


def near_the_best(problem: Problem, tried: Sequence[Evaluation], gpu: Gpu) -> list[KernelConfig]:
    """Neighbours of the fastest proven candidate of each launch option that were not tried, options in turns."""
    known = {e.config for e in tried}
    turns = []
    for pdl in launch_options(problem, gpu):
        passed = [e for e in tried if e.status is Status.PASSED and e.timing and e.speedup and e.config.pdl is pdl]
        if passed:
            best = max(passed, key=lambda e: e.speedup.ratio if e.speedup else 0.0).config
            turns.append([c for c in neighbours(problem, best, gpu) if c not in known])
    return in_turns(*turns)
