"""The knob policy: a kernel is built knob by knob, among what is offered."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.kernel_space import without_launch
from outblas.tune.agents.base import unexplored
from outblas_lab.agents.launch_turns import LaunchTurns
from outblas_lab.train.knob_choice import Offer
from outblas_lab.train.knob_policy import KnobPolicy
from outblas_lab.train.knob_view import SearchState, every_knob

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import Recording
    from outblas_lab.train.knob_settings import KnobSettings

#: Environment variable: the file of the policy to follow.
KNOB_POLICY_VARIABLE = "OUTBLAS_KNOB_POLICY"


class KnobAgent(LaunchTurns):
    """Policy trained by PPO to choose a kernel knob by knob; legal by construction.

    The likeliest untried candidates come first. Their probability is the product over the knobs, each among the values
    that a candidate has. Each launch option is a separate search, and they take turns. No policy is packaged, since the
    regressor needs no reinforcement learning and does as well or better (docs/search/knob-by-knob.md).

    Args:
        seed: seed of a training in :meth:`prepare`; a loaded policy does not draw.
        gpu: GPU that the candidates run on.
        policy: policy to follow. None: the file in ``OUTBLAS_KNOB_POLICY``, read at the first proposal. Without it,
            the first proposal raises UsageError.
    """

    draws, learns = False, True

    def __init__(self, seed: int, gpu: Gpu, policy: KnobPolicy | None = None) -> None:
        super().__init__(seed, gpu)
        self._policy, self._view = policy, every_knob()

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Train a policy on these problems by :meth:`recipe` and follow it; return None.

        The trained policy is kept in the cache, and a second call reads it. An interrupted training resumes.

        Args:
            recording: measurements of ``problems``.
            problems: training problems; a part of them is kept for validation.
        """
        from outblas_lab.recordings.recording import TrainingPart
        from outblas_lab.train.train_knobs import train_knobs
        from outblas_lab.train.train_ppo import TrainingRun
        from outblas_lab.train.training_cache import training_cache_folder

        settings, parts = self.recipe(), [TrainingPart(recording, tuple(problems))]
        own = training_cache_folder("knob-policies", parts, asdict(settings))
        self._policy = train_knobs(recording, problems, settings, TrainingRun(own))

    def recipe(self) -> KnobSettings:
        """Return the training settings, with this agent's seed."""
        from outblas_lab.train.knob_settings import KnobSettings

        return KnobSettings(seed=self.seed)

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(group, history)
        if not left:
            return []
        policy = self._load()
        state = self._state(SearchState(policy.see(problem, self.gpu), launch_of(left[0])), history)
        vectors = np.stack([self._view.encode(without_launch(config)) for config in left])
        return [left[i] for i in policy.order(Offer(state, vectors, np.arange(len(left))), n)]

    def _state(self, begun: SearchState, history: Sequence[Evaluation]) -> SearchState:
        """Return the state of a search after its measurements."""
        proven = [(e.timing.median_us, e.template) for e in history if e.timing is not None]
        if not proven:
            return replace(begun, made=len(history))
        best_us, best = min(proven, key=lambda pair: pair[0])
        gap = math.log(proven[-1][0] / best_us)
        return replace(begun, made=len(history), best=self._view.encode(without_launch(best)), gap=gap)

    def _load(self) -> KnobPolicy:
        if self._policy is None:
            file = os.environ.get(KNOB_POLICY_VARIABLE)
            if not file:
                train_one = "train one: outblas train --env knobs"
                raise UsageError(f"agent {self.name} without a policy", f"a file in {KNOB_POLICY_VARIABLE}", train_one)
            self._policy = KnobPolicy.load(file)
        return self._policy
