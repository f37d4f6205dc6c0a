"""The trained policy: PPO across shapes learned which candidates to try first, and next after each answer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.gpu_records import nearest_with_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import unexplored
from outblas_lab.agents.launch_turns import LaunchTurns, LearnsAcross
from outblas_lab.train.policy import CandidateView, Policy, greedy_scorer

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import TrainingPart
    from outblas_lab.train.train_ppo import PpoSettings

#: Environment variable: name or path of the policy to follow, instead of the packaged one.
POLICY_VARIABLE = "OUTBLAS_POLICY"


class Ppo(LearnsAcross, LaunchTurns):
    """Policy trained by PPO across shapes; it adapts to measurements.

    Untried candidates with the highest score come first; the score depends on the problem's measurements so far. Each
    launch option is a separate search, and they take turns (:func:`outblas_lab.agents.launch_turns.each_launch`).

    Args:
        seed: seed of a training in :meth:`prepare`; a loaded policy does not draw.
        policy: policy to follow. None: the name or path in ``OUTBLAS_POLICY``, else :func:`packaged_policy`. It is
            loaded at the first proposal, which raises UsageError if it does not exist.
    """

    draws, learns, across = False, True, True

    def __init__(self, seed: int, gpu: Gpu, policy: Policy | None = None) -> None:
        super().__init__(seed, gpu)
        self._policy = policy
        self._views: dict[tuple[Problem, int], CandidateView] = {}

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Train a policy on these problems by :meth:`recipe` and follow it from now on; it replaces any other policy.

        The trained policy is kept in the cache, and a second call reads it. An interrupted training resumes.

        Args:
            parts: training problems; some (N, K) are kept for validation, on all GPUs.
        """
        from outblas_lab.train.regression import regressor_cache_path
        from outblas_lab.train.train_ppo import TrainingRun, train
        from outblas_lab.train.training_part import split_parts, training_cache_folder

        settings = self.recipe()
        shared = regressor_cache_path(split_parts(parts, self.seed)[0], settings.regress, self.seed)
        own = training_cache_folder("policies", parts, asdict(settings))
        self._policy = train(parts, settings, TrainingRun(own, shared))
        self._views.clear()

    def recipe(self) -> PpoSettings:
        """Return the training settings of the packaged policy, with this agent's seed in place of its seed."""
        from outblas_lab.train.train_ppo import RECIPE

        return replace(RECIPE, seed=self.seed)

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        place = {config: i for i, config in enumerate(group)}
        seen = [e for e in history if e.config in place]
        proven = [e for e in seen if e.timing is not None]
        scores = self._load().scores(
            self._view(problem, group),
            [place[e.template] for e in seen],
            [place[e.template] for e in proven],
            [math.log(e.timing.median_us) for e in proven if e.timing is not None],
        )
        return unexplored([group[i] for i in np.argsort(-scores, kind="stable")], history)

    def _view(self, problem: Problem, group: Sequence[KernelConfig]) -> CandidateView:
        key = problem, hash(tuple(group))
        if key not in self._views:
            if len(self._views) > 256:
                self._views.clear()
            self._views[key] = self._load().view(problem, group, self.gpu)
        return self._views[key]

    def _load(self) -> Policy:
        if self._policy is None:
            self._policy = loaded_policy(os.environ.get(POLICY_VARIABLE) or packaged_policy(self.gpu))
        return self._policy


def packaged_policy(gpu: Gpu) -> str:
    """Return the name of the packaged policy for a GPU: its own, or that of the most similar GPU that has one."""
    return nearest_with_data(gpu, "policies", ".npz")


@lru_cache(maxsize=4)
def loaded_policy(name: str) -> Policy:
    """Return a policy as :meth:`outblas_lab.train.policy.Policy.load`, which raises its errors; each is read once.

    Args:
        name: a packaged policy, e.g. ``h200``; with a path separator a file, e.g. ``runs/ppo/policy.npz``.
    """
    return Policy.load(Path(name) if os.sep in name else name)


class RegressorAgent(Ppo):
    """Network that predicts times, corrected by measurements; no reinforcement learning.

    The untried candidate with the shortest believed time comes first. That is where a training of agent ``ppo`` begins.
    Arguments are those of :class:`outblas_lab.agents.ppo.Ppo`; of a policy, only the regressor counts.
    """

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Train the regressor as :meth:`outblas_lab.agents.surrogate.Surrogate.prepare_across`; raise its errors."""
        from outblas_lab.train.regression import regressor_of_ppo

        self._policy = Policy(regressor_of_ppo(parts, self.seed), greedy_scorer())
        self._views.clear()

    def _load(self) -> Policy:
        if self._policy is None:
            self._policy = replace(super()._load(), scorer=greedy_scorer(), about="")
        return self._policy
