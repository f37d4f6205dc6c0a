"""Searches of one problem by all arms in step: each asks for one kernel, and all answers come before the next step."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.search.agents.base import Agent
from outblas.search.compare.held_out import only_proposal
from outblas.search.live_compare.live_arms import LiveArm

#: Held while an agent is asked. Strategies of Kernel Tuner draw from the process's own generators.
_ASKING = threading.Lock()


@dataclass(frozen=True)
class Pick:
    """The choice of a search after a number of measurements.

    Attributes:
        arm: text of the arm.
        seed: seed of the agent.
        budget: measurements that the agent was allowed.
        measurements: measurements that it made, by its own count. Fewer if it had no more proposals.
        config: the fastest kernel that passed; None if none did.
    """

    arm: str
    seed: int
    budget: int
    measurements: int
    config: KernelConfig | None


class ArmSearch:
    """The search of one problem by one agent, one measurement at a time.

    Args:
        arm: the agent and its space.
        agent: the agent; it is copied, so answers of this problem do not help in another.
        problem: the problem.
        offered: candidates of the space.

    Attributes:
        cpu_s: seconds that the agent took to propose and to observe.
    """

    def __init__(self, arm: LiveArm, agent: Agent, problem: Problem, offered: Sequence[KernelConfig]) -> None:
        learns = type(agent).observe is not Agent.observe
        self.arm, self._agent, self._problem = arm, copy.deepcopy(agent) if learns else agent, problem
        self._offered, self._allowed = offered, frozenset(offered)
        self._history: list[Evaluation] = []
        self._finished = False
        self.cpu_s = 0.0

    def ask(self) -> KernelConfig | None:
        """Return the next kernel to measure; None if the agent has finished.

        Raises:
            UsageError: the agent breaks its contract.
        """
        if self._finished or len(self._history) == len(self._allowed):
            return None
        with _ASKING:
            begin = time.thread_time()
            proposed = self._agent.propose(self._problem, self._offered, self._history, 1)
            self.cpu_s += time.thread_time() - begin
        self._finished = not proposed
        if self._finished:
            return None
        return only_proposal(proposed, self._agent, self._problem, self._allowed, self._history)

    def tell(self, evaluation: Evaluation) -> None:
        """Give the answer to the last question; return None. It counts as a measurement, however it was got."""
        self._history.append(evaluation)
        begin = time.thread_time()
        self._agent.observe([evaluation])
        self.cpu_s += time.thread_time() - begin

    def picks(self, budgets: Iterable[int]) -> list[Pick]:
        """Return the choice after each number of measurements.

        Args:
            budgets: numbers of measurements.
        """
        return [
            Pick(str(self.arm), self._agent.seed, b, min(b, len(self._history)), fastest(self._history[:b]))
            for b in budgets
        ]


def search_in_step(
    searches: Sequence[ArmSearch], measure: Callable[[Collection[KernelConfig]], Mapping[KernelConfig, Evaluation]],
    most: int, step_done: Callable[[], None],
) -> None:  # fmt: skip
    """Run all searches of a problem; return None. A kernel that several ask for in one step is measured once.

    Args:
        searches: the searches, none begun.
        measure: answers the questions of a step.
        most: measurements of each search.
        step_done: called after each of ``most`` steps, those without a question included.
    """
    for _ in range(most):
        asked = [(search, config) for search in searches if (config := search.ask()) is not None]
        answers = measure(dict.fromkeys(config for _, config in asked)) if asked else {}
        for search, config in asked:
            search.tell(answers[config])
        step_done()


def fastest(history: Sequence[Evaluation]) -> KernelConfig | None:
    """Return the fastest kernel that passed; None if none did. The first one wins a tie.

    The speed-up over the baseline of the same rounds decides if every passed kernel has one, else the time.

    Args:
        history: evaluations of one problem.
    """
    passed = [e for e in history if e.timing is not None]
    if not passed:
        return None
    ratios = [e.speedup.ratio for e in passed if e.speedup is not None]
    if len(ratios) == len(passed):
        return max(zip(ratios, passed, strict=True), key=lambda pair: pair[0])[1].template
    return min(passed, key=lambda e: e.timing.median_us if e.timing else math.inf).template
