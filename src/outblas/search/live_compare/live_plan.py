"""The plan of a live comparison, said before the first measurement, and its budget of GPU seconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.search.live_compare.problem_entry import LiveSearches

#: Seconds that a plan assumes for a new kernel: compilation, proof and rounds. A guess until a problem is done.
GUESSED_SECONDS = 0.3


@dataclass
class RunBudget:
    """GPU seconds of a run, shared by the threads of its GPUs.

    Attributes:
        limit: seconds in all; None: no limit.
        spent: seconds of the finished problems, those of earlier commands included.
        problems: number of finished problems.
    """

    limit: float | None
    spent: float = 0.0
    problems: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        """Count a finished problem; return None."""
        with self._lock:
            self.spent += seconds
            self.problems += 1

    def has_room(self) -> bool:
        """Return True if another problem may begin: the mean of the finished ones still fits, or there is no limit."""
        with self._lock:
            mean = self.spent / self.problems if self.problems else 0.0
            return self.limit is None or (self.spent < self.limit and self.spent + mean <= self.limit)


def plan_lines(
    problems: Sequence[Problem], searches: LiveSearches, budget: RunBudget,
    offered: Callable[[str, Problem], Sequence[KernelConfig]],
) -> list[str]:  # fmt: skip
    """Return the plan in words: problems, searches, measurements at most, and seconds of the GPU.

    Args:
        problems: all problems.
        searches: arms, seeds and numbers of measurements.
        budget: the spent seconds, and the limit.
        offered: returns the candidates of a space for a problem.
    """
    most = searches.budgets[-1]
    runs = Counter(arm.space for arm, _ in searches.runs)
    new = 0
    for problem in problems:
        sizes = {space: len(offered(space, problem)) for space in runs}
        new += min(sum(min(count * most, sizes[space]) for space, count in runs.items()), max(sizes.values()))
    arms = len({str(arm) for arm, _ in searches.runs})
    rate = f"{GUESSED_SECONDS:g} s each, a guess"
    limit = "no limit" if budget.limit is None else f"a limit of {budget.limit:.0f} GPU seconds"
    spaces = ", ".join(f"{count} in space {space}" for space, count in runs.items())
    return [
        f"plan: {len(problems)} problems, {arms} arms, {len(searches.runs)} searches of a problem ({spaces}), "
        f"{most} measurements each",
        f"plan: at most {new} different kernels to measure, about {new * GUESSED_SECONDS:.0f} GPU seconds ({rate}); "
        f"{limit}, of which {budget.spent:.0f} s are spent",
    ]
