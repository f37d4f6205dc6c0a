"""The knob policies: kernels are chosen by actions on knobs, among what is offered."""

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
from outblas.learn.knob_designs.knob_design import Offer
from outblas.learn.knob_policy import KnobPolicy
from outblas.learn.knob_prior import KnobPrior, PriorView
from outblas.learn.knob_view import KnobView, SearchState
from outblas.search.agents.base import LaunchTurns, unexplored

if TYPE_CHECKING:
    from outblas.learn.train.knob_settings import KnobSettings
    from outblas.records.recording import Recording

#: Environment variable: the file of the policy to follow.
KNOB_POLICY_VARIABLE = "OUTBLAS_KNOB_POLICY"
#: Views of this number of problems are kept.
KEPT_VIEWS = 256


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
    #: Name of the design that is trained and followed.
    design = "build"

    def __init__(self, seed: int, gpu: Gpu, policy: KnobPolicy | None = None) -> None:
        super().__init__(seed, gpu)
        self._policy, self._view = policy, KnobView(all_knobs())
        self._priors: dict[tuple[Problem, int], PriorView] = {}

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Train a policy on these problems by :meth:`recipe` and follow it; return None.

        The trained policy is kept in the cache, and a second call reads it. An interrupted training resumes. A prior's
        regressor is that of agent ``regressor`` with the same seed.

        Args:
            recording: measurements of ``problems``.
            problems: training problems; a part of them is kept for validation.
        """
        from outblas.learn.train.regression import regressor_cache_path
        from outblas.learn.train.train_knobs import train_knobs
        from outblas.learn.train.train_ppo import TrainingRun
        from outblas.learn.train.training_cache import training_cache_folder
        from outblas.learn.train.training_part import TrainingPart, split_parts

        settings, parts = self.recipe(), [TrainingPart(recording, tuple(problems))]
        shared = regressor_cache_path(split_parts(parts, self.seed)[0], settings.regress, self.seed)
        own = training_cache_folder("knob-policies", parts, asdict(settings))
        self._policy = train_knobs(recording, problems, settings, TrainingRun(own, shared))
        self._priors.clear()

    def recipe(self) -> KnobSettings:
        """Return the training settings of the design, with this agent's seed in place of its seed."""
        from outblas.learn.train.knob_settings import KNOB_RECIPES

        return replace(KNOB_RECIPES[self.design], seed=self.seed)

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(group, history)
        if not left:
            return []
        policy = self._load()
        state = self._state(SearchState(policy.see(problem, self.gpu), launch_of(left[0])), history)
        vectors = np.stack([self._view.encode(without_launch(config)) for config in left])
        believed = None if policy.prior is None else self._believed(policy.prior, problem, group, history)
        return [left[i] for i in policy.order(Offer(state, vectors, np.arange(len(left)), believed), n)]

    def _believed(
        self, prior: KnobPrior, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation]
    ) -> np.ndarray:
        """Return the believed times of the untried kernels of a group, float64, as in an offer."""
        key = problem, hash(tuple(group))
        if key not in self._priors:
            if len(self._priors) >= KEPT_VIEWS:
                self._priors.clear()
            self._priors[key] = prior.view(problem, group, self.gpu)
        place = {config: i for i, config in enumerate(group)}
        tried = {e.config for e in history}
        proven = [(place[e.template], e.timing.median_us) for e in history if e.timing and e.config in place]
        believed = self._priors[key].believed([i for i, _ in proven], [math.log(us) for _, us in proven])
        return believed[[i for i, config in enumerate(group) if config not in tried]]

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
            train_one = f"train one: outblas train --env knobs --design {self.design}"
            if not file:
                raise UsageError(f"agent {self.name} without a policy", f"a file in {KNOB_POLICY_VARIABLE}", train_one)
            policy = KnobPolicy.load(file)
            if policy.design != self.design:
                wrong = f"agent {self.name} with a policy of design {policy.design}"
                raise UsageError(wrong, f"design {self.design} in {KNOB_POLICY_VARIABLE}", train_one)
            self._policy = policy
        return self._policy


class KnobEdit(KnobAgent):
    """Policy trained by PPO to change the knobs of the regressor's first choice, or to measure it.

    Arguments are those of :class:`KnobAgent`; a policy must be of design ``edit``.
    """

    design = "edit"


class KnobRank(KnobAgent):
    """Policy trained by PPO to choose among the 32 untried candidates that the regressor ranks first.

    Arguments are those of :class:`KnobAgent`; a policy must be of design ``rank``.
    """

    design = "rank"
