"""Training by the published recipe: PPO on a recording from scratch, under a named reward (sb3-contrib).

The recipe has no regressor and chooses no checkpoint: the policy starts without a belief, and the last one counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.files import lock_folder, write_json
from outblas.predict.features import CANDIDATE_FEATURES, PROBLEM_FEATURES
from outblas.predict.posterior import Regressor
from outblas_lab.recordings.recording import TrainingPart
from outblas_lab.train.policy import Policy
from outblas_lab.train.recipe_evaluator import RecipeCells, RecipeEvaluator
from outblas_lab.train.reward import HIT_RATE
from outblas_lab.train.rl_packages import BaseCallback, torch
from outblas_lab.train.torch_threads import one_thread
from outblas_lab.train.train_ppo import (
    PpoSettings,
    TrainingRun,
    claim_folder,
    make_learner,
    save_checkpoint,
    wandb_run,
)

#: Updates between two checkpoints, and the most points of a curve that are kept.
CHECKPOINT_EVERY, CURVE_POINTS = 4, 20
#: Called with (episodes done, episodes in all, message).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RecipeSettings:
    """Hyper-parameters of the recipe. :meth:`ppo` adds those of PPO that it does not search.

    Attributes:
        shapes: problems to train on.
        episodes: episodes of each, on average. The recipe has 500 to 2,000.
        budget: measurements per episode.
        lr: Adam's learning rate.
        batch: transitions per minibatch.
        gamma: discount.
        entropy: factor of the entropy bonus.

    Raises:
        UsageError: a number is below 1. :meth:`ppo` checks the others.
    """

    shapes: int = 100
    episodes: int = 30
    budget: int = 8
    lr: float = 1e-3
    batch: int = 128
    gamma: float = 0.98
    entropy: float = 0.01

    def __post_init__(self) -> None:
        for name in ("shapes", "episodes", "budget"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "1 or more", f"pass a larger --{name}")

    def ppo(self, preset: str, seed: int) -> PpoSettings:
        """Return the settings of a training under a preset of the reward."""
        steps, usual = self.shapes * self.episodes * self.budget, PpoSettings()
        rollout = max(1, min(usual.rollout, steps // usual.envs))  # a short training makes one update at least
        return PpoSettings(
            lr=self.lr, batch=self.batch, gamma=self.gamma, entropy=self.entropy, budget=self.budget, preset=preset,
            seed=seed, steps=steps, rollout=rollout,
        )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A trained policy, and the course of its training.

    Attributes:
        policy: the last policy.
        curve: at most 20 points: (episodes, mean reward of an episode, mean L2 hit rate, share of failed candidates).
            A point is of the episodes and measurements since the one before.
        last_reward: mean reward of the last hundred episodes.
    """

    policy: Policy
    curve: list[tuple[int, float, float, float]]
    last_reward: float


def blank_regressor() -> Regressor:
    """Return a regressor that believes every candidate to be equally fast."""
    inputs = len(PROBLEM_FEATURES) + len(CANDIDATE_FEATURES)
    nothing = np.zeros(inputs, np.float32)
    return Regressor(nothing, nothing, (np.zeros((1, inputs, 1), np.float32),), (np.zeros((1, 1, 1), np.float32),))


def train_by_reward(
    part: TrainingPart, settings: PpoSettings, cells: RecipeCells, run: TrainingRun, progress: Progress | None = None
) -> Trained:
    """Train a policy on recorded problems under ``settings.preset``; the last policy counts.

    With ``run.wandb`` every update logs ``reward``, ``l2_hit_rate`` and ``failed_share`` to Weights & Biases, offline.
    The result is the same for the same seed. torch has one thread meanwhile.

    Args:
        part: the problems.
        settings: hyper-parameters. The steps are those of all episodes.
        cells: hit rates and faults.
        run: folder of checkpoints; a training of the same settings goes on there. Without one, nothing is kept.
        progress: called after each update with (episodes done, episodes, text).

    Raises:
        UsageError: the folder has a training of other settings.
        RecordError: a checkpoint cannot be read or written, or another process trains in the folder.
        ToolchainMissing: wandb is wanted and not installed.
    """
    with contextlib.nullcontext() if run.path is None else lock_folder(run.path), one_thread():
        claim_folder(run, settings, [part])
        return _train(part, settings, cells, run, progress)


def _train(
    part: TrainingPart, settings: PpoSettings, cells: RecipeCells, run: TrainingRun, progress: Progress | None
) -> Trained:
    torch.manual_seed(settings.seed)
    begun = Policy(blank_regressor(), {})
    model, done = make_learner([part], settings, begun, run, partial(RecipeEvaluator, cells=cells))
    watch = _Watch(settings, run, done, progress)
    if done < settings.steps:
        model.learn(settings.steps - done, callback=watch, reset_num_timesteps=done == 0)
    return watch.trained(begun.regressor, model)


class _Watch(BaseCallback):
    """After every update: a point of the curve and of the log; after every few updates a checkpoint."""

    def __init__(self, settings: PpoSettings, run: TrainingRun, done: int, progress: Progress | None) -> None:
        super().__init__()
        self._settings, self._run, self._progress = settings, run, progress
        self._rates: list[float] = []
        self._failed = self._updates = 0
        self._curve: list[tuple[int, float, float, float]] = []
        kept = run.file("curve.json")
        if kept is not None and kept.exists():
            points = [tuple(point) for point in json.loads(kept.read_text())]
            self._curve = [point for point in points if point[0] <= done // settings.budget]  # not after the checkpoint
        self._tracker = wandb_run(run, settings, mode="offline") if run.wandb else None

    def trained(self, regressor: Regressor, model: Any) -> Trained:
        """Return the result of the training."""
        policy = Policy(regressor, model.policy.features_extractor.arrays())
        thin = max(1, -(-len(self._curve) // CURVE_POINTS))
        kept = [*self._curve[thin - 1 :: thin]] if self._curve else []
        return Trained(policy, kept, self._curve[-1][1] if self._curve else 0.0)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            self._rates.append(info["counters"].get(HIT_RATE, 0.0))
            self._failed += info["status"] != Status.PASSED.value
        return True

    def _on_rollout_end(self) -> None:
        episodes = self.num_timesteps // self._settings.budget
        paid = [e["r"] for e in self.model.ep_info_buffer or ()]
        reward, rate = float(np.mean(paid)) if paid else 0.0, float(np.mean(self._rates))
        failed = self._failed / len(self._rates)
        self._curve.append((episodes, round(reward, 5), round(rate, 5), round(failed, 5)))
        self._rates, self._failed = [], 0
        if self._tracker is not None:
            figures = {"reward": reward, "l2_hit_rate": rate, "failed_share": failed}
            self._tracker.log(figures, step=self.num_timesteps)
        if self._progress is not None:
            total = self._settings.steps // self._settings.budget
            said = f"reward {reward:.3f}, L2 hits {rate:.1%}, failed {failed:.1%}"
            self._progress(min(episodes, total), total, said)

    def _on_rollout_start(self) -> None:
        if self._updates and self._updates % CHECKPOINT_EVERY == 0:
            self._keep()
        self._updates += 1

    def _on_training_end(self) -> None:
        self._keep()
        if self._tracker is not None:
            self._tracker.finish()

    def _keep(self) -> None:
        """Write the checkpoint and the curve so far."""
        model, curve = self._run.file("ppo.zip"), self._run.file("curve.json")
        if model is not None and curve is not None:
            write_json(curve, self._curve)
            save_checkpoint(self.model, model)
