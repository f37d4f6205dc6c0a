"""Settings of a training over knobs."""

from __future__ import annotations

from dataclasses import dataclass

from outblas_lab.train.learner_settings import LearnerSettings, require


@dataclass(frozen=True)
class KnobSettings(LearnerSettings):
    """Every hyper-parameter of the recipe. A transition is one action.

    Attributes:
        simulated: share of the transitions on the simulated GPU, 0 to 1. The rest are on the recording.
        width: units of each of the two hidden layers, of the policy and of the value; 1 to 4096.
        checkpoint: updates between two checkpoints, of which the best is kept.

    Raises:
        UsageError: a value is outside its range.
    """

    lr: float = 5e-4
    batch: int = 256
    gamma: float = 1.0
    entropy: float = 0.01
    steps: int = 300_000
    rollout: int = 256
    budget: int = 4
    simulated: float = 0.5
    width: int = 128
    checkpoint: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        require("simulated", self.simulated, 0 <= self.simulated <= 1, "a number from 0 to 1")
        require("checkpoint", self.checkpoint, self.checkpoint >= 1, "1 or more")
        require("width", self.width, 1 <= self.width <= 4096, "an integer from 1 to 4096")

    @property
    def simulated_steps(self) -> int:
        """Return the transitions on the simulated GPU."""
        return round(self.simulated * self.steps)
