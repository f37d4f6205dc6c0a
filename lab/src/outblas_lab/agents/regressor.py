"""The network of agent ``ppo`` without reinforcement learning: its ablation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outblas_lab.agents.ppo import POLICY_VARIABLE, Ppo, loaded_policy, packaged_policy
from outblas_lab.train.policy import Policy, greedy_scorer

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import TrainingPart


class RegressorAgent(Ppo):
    """Network that predicts times, corrected by measurements; no reinforcement learning.

    The untried candidate with the shortest believed time comes first. That is where a training of agent ``ppo`` begins.
    Arguments are those of :class:`outblas_lab.agents.ppo.Ppo`; of a policy, only the regressor counts.
    """

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Train the regressor of agent ``ppo`` with the same seed, or read it from the cache; return None.

        Args:
            parts: training problems of one GPU or several.

        Raises:
            UsageError: a problem is not in its recording, or none has two proven cells.
            ToolchainMissing: torch is not installed; proposals do not need it.
        """
        from outblas_lab.train.regression import regressor_of_ppo

        self._policy = Policy(regressor_of_ppo(parts, self.seed), greedy_scorer())
        self._views.clear()

    def _load(self) -> Policy:
        if self._policy is None:
            trained = loaded_policy(os.environ.get(POLICY_VARIABLE) or packaged_policy(self.gpu))
            self._policy = replace(trained, scorer=greedy_scorer(), about="")
        return self._policy
