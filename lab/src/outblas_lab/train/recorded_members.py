"""The members of a space that a recording has: the kernels that an environment may offer on a replay.

A recording answers recorded cells only. So in a training on it, other members do not count as legal: nothing is
interpolated.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import Launch
from outblas.core.problem import Problem
from outblas.kernels.kernel_space import KernelSpace
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.reward import reward


class RecordedMembers:
    """Recorded members of each problem and launch option, and the scale of their rewards.

    Args:
        space: the kernels.
        preset: name of the reward.
    """

    def __init__(self, recording: Recording, space: KernelSpace, preset: str = "gated") -> None:
        self._recording, self._space, self._preset = recording, space, preset
        self._evaluator = ReplayEvaluator(recording)
        self._place = np.array([-1 if (i := space.place(c)) is None else i for c in recording.catalogue], np.intp)
        self.reward_scale = functools.lru_cache(maxsize=None)(self._scale)

    def columns(self, problem: Problem, launch: Launch) -> NDArray[np.intp]:
        """Return the columns of the recording that hold a member of the space with a launch option.

        Raises:
            UsageError: the problem was not recorded.
        """
        columns = self._recording.by_launch(problem).get(launch, np.array([], np.intp))
        return columns[self._place[columns] >= 0]

    def offered(self, problem: Problem, launch: Launch) -> NDArray[np.intp]:
        """Return the recorded members, indices into the space, in the order of the catalogue.

        Raises:
            UsageError: the problem was not recorded.
        """
        return self._place[self.columns(problem, launch)]

    def _scale(self, problem: Problem, launch: Launch) -> tuple[float, float]:
        """Return mean and standard deviation, at least 0.01, of the rewards of the recorded members."""
        configs = [self._space.config(int(place), launch) for place in self.offered(problem, launch)]
        found = [reward(e, self._preset) for e in self._evaluator.evaluate([(problem, c) for c in configs])]
        return float(np.mean(found)), max(0.01, float(np.std(found)))
