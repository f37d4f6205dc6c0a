"""Settings that every training of a policy by PPO has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outblas.core.errors import UsageError


@dataclass(frozen=True)
class LearnerSettings:
    """Hyper-parameters of PPO. A recipe derives from it, with defaults of its own and what else it needs.

    Attributes:
        lr: Adam's learning rate, above 0.
        batch: transitions per minibatch, 2 or more.
        gamma: discount per transition, 0 to 1.
        entropy: factor of the entropy bonus, 0 or more.
        steps: transitions in all.
        rollout: transitions per update of each environment.
        envs: environments side by side.
        epochs: passes over an update's transitions.
        clip: PPO's bound of the probability ratio.
        gae: lambda of the generalised advantage estimate.
        budget: measurements per episode; 1 makes a contextual bandit.
        seed: seed of everything, 0 to 2**32 - 1.

    Raises:
        UsageError: a value is outside its range. ``clip`` and ``gae`` are not checked.
    """

    lr: float
    batch: int
    gamma: float
    entropy: float
    steps: int
    rollout: int
    envs: int = 8
    epochs: int = 4
    clip: float = 0.2
    gae: float = 0.95
    budget: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rollout", "envs", "epochs", "budget"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        require("batch", self.batch, self.batch >= 2, "2 or more")
        require("lr", self.lr, 0 < self.lr < math.inf, "a number above 0")
        require("entropy", self.entropy, 0 <= self.entropy < math.inf, "a number of 0 or more")
        require("gamma", self.gamma, 0 <= self.gamma <= 1, "a number from 0 to 1")
        require("seed", self.seed, 0 <= self.seed < 2**32, "an integer from 0 to 4294967295")

    def learner_arguments(self) -> dict[str, Any]:
        """Return these settings as arguments of sb3-contrib's ``MaskablePPO``, on the CPU."""
        return {
            "learning_rate": self.lr, "n_steps": self.rollout, "batch_size": self.batch, "n_epochs": self.epochs,
            "gamma": self.gamma, "gae_lambda": self.gae, "clip_range": self.clip, "ent_coef": self.entropy,
            "seed": self.seed, "device": "cpu",
        }  # fmt: skip


def require(name: str, value: object, fits: bool, expected: str) -> None:
    """Return None if a setting fits.

    Args:
        name: name of the setting.
        value: its value.
        fits: True if the value is in its range.
        expected: the range in words.

    Raises:
        UsageError: it does not fit.
    """
    if not fits:
        raise UsageError(f"{name} is {value}", expected, f"correct {name}")
