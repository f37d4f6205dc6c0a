"""An agent in a file: the kernels that were the fastest most often elsewhere, most frequent first.

Score it with ``outblas recording score examples/agent_file.py --sample 40``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.recordings.recording import Recording


class FrequentWinners(Agent):
    """Fastest kernels of the training problems, most frequent first."""

    draws = False

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self.wins: Counter[KernelConfig] = Counter()

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        for problem in problems:
            for pdl in (False, True):  # a search is for one launch option
                best = recording.best(problem, pdl)
                if best is not None:
                    self.wins[best[0]] += 1

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        return sorted(left, key=lambda config: -self.wins[config])[:n]
