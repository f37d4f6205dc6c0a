"""The knob policy: a kernel is chosen knob by knob, among what is offered."""

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
from outblas.kernels.knobs import all_knobs
from outblas.learn.knob_policy import KnobPolicy, KnobView, SearchState
from outblas.search.agents.base import LaunchTurns, unexplored

if TYPE_CHECKING:
    from outblas.records.recording import Recording

#: Environment variable: the file of the policy to follow.
KNOB_POLICY_VARIABLE = "OUTBLAS_KNOB_POLICY"


class KnobAgent(LaunchTurns):
    """Policy trained by PPO to choose a kernel knob by knob; legal by construction.

    The likeliest untried candidates come first. Their probability is the product over the knobs, each among the values
    that a candidate has. Each launch option is a separate search, and they take turns. No policy is packaged, since the
    regressor finds better kernels with the same measurements (docs/search/knob-by-knob.md).

    Args:
        seed: seed of a training in :meth:`prepare`; a loaded policy does not draw.
        gpu: GPU that the candidates run on.
        policy: policy to follow. None: the file in ``OUTBLAS_KNOB_POLICY``, read at the first proposal. Without it,
            the first proposal raises UsageError.
    """

    draws, learns = False, True

    def __init__(self, seed: int, gpu: Gpu, policy: KnobPolicy | None = None) -> None:
        super().__init__(seed, gpu)
        self._policy, self._view = policy, KnobView(all_knobs())

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Train a policy on these problems by the recipe and follow it; return None.

        The trained policy is kept in the cache, and a second call reads it. An interrupted training resumes.

        Args:
            recording: measurements of ``problems``.
            problems: training problems; a part of them is kept for validation.
        """
        from outblas.learn.train.train_knobs import KNOB_RECIPE, train_knobs
        from outblas.learn.train.train_ppo import TrainingRun
        from outblas.learn.train.training_cache import training_cache_folder
        from outblas.learn.train.training_part import TrainingPart

        settings = replace(KNOB_RECIPE, seed=self.seed)
        own = training_cache_folder("knob-policies", [TrainingPart(recording, tuple(problems))], asdict(settings))
        self._policy = train_knobs(recording, problems, settings, TrainingRun(own))

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(group, history)
        if not left:
            return []
        policy = self._load()
        about = policy.see(problem, self.gpu)
        state = self._state(SearchState(about, launch_of(left[0])), history)
        vectors = np.stack([self._view.encode(without_launch(config)) for config in left])
        likeliest = np.argsort(-policy.log_probabilities(self._view, state, vectors), kind="stable")
        return [left[i] for i in likeliest]

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
                raise UsageError(
                    "agent knob without a policy", f"a file in {KNOB_POLICY_VARIABLE}",
                    "train one: outblas train --env knobs",
                )  # fmt: skip
            self._policy = KnobPolicy.load(file)
        return self._policy
