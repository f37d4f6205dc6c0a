"""A learner on a fake machine, whose thread the test is."""

from __future__ import annotations

import itertools
from typing import Any

from outblas.adapt.learning.learner import CALLS_BEFORE_QUEUED, Learner
from outblas.adapt.learning.slice_limits import GpuBudget
from outblas.core.config import Launch
from outblas.core.problem import Problem
from outblas.dispatch.decide import LeftToTorch
from support.gpus.known import H200
from support.learning.fake_machine import OWN, PROBLEM, FakeMachine


class LoneLearner:
    """A learner whose thread the test is, unless it says otherwise."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.machine, self.capturing, self.ticks = FakeMachine(), False, itertools.repeat(0.0)
        self.learner = Learner(
            GpuBudget(seconds), lambda index, own, gpu: self.machine, lambda: self.capturing, lambda: next(self.ticks)
        )

    def call(self, problem: Problem = PROBLEM, launch: Launch = "plain", own: Any = lambda *_: OWN) -> Any:
        """Return the answer to one call; for torch, the reason and whether it is provisional."""
        try:
            return self.learner.row_for(0, own, problem, H200, launch)
        except LeftToTorch as error:
            return str(error), error.provisional

    def queue(self, problem: Problem = PROBLEM, launch: Launch = "plain") -> None:
        for _ in range(CALLS_BEFORE_QUEUED):
            self.call(problem, launch)

    def work(self) -> int:
        """Do all slices; return their number."""
        return sum(1 for _ in iter(self.learner.advance, None))

    def one(self) -> Any:
        (product,) = self.learner.report().products
        return product
