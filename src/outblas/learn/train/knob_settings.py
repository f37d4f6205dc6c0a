"""Settings of a training over knobs, and the recipe of each design."""

from __future__ import annotations

from dataclasses import dataclass, field

from outblas.learn.knob_designs.design_registry import DEFAULT_DESIGN, DESIGNS
from outblas.learn.knob_prior import PRIORS
from outblas.learn.train.learner_settings import LearnerSettings, require
from outblas.learn.train.regression import RegressSettings


@dataclass(frozen=True)
class KnobSettings(LearnerSettings):
    """Every hyper-parameter of the recipe. A transition is one action.

    Attributes:
        simulated: share of the transitions on the simulated GPU, 0 to 1. The rest are on the recording. 0 for a design
            with a prior: the simulator is the cost model, which would know its own answers.
        width: units of each of the two hidden layers, of the policy and of the value; 1 to 4096.
        design: name of the design.
        prior: name of the prior (:data:`outblas.learn.knob_prior.PRIORS`); empty for a design without one.
        checkpoint: updates between two checkpoints, of which the best is kept.
        regress: settings of the training of the prior's regressor.

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
    design: str = DEFAULT_DESIGN
    prior: str = ""
    checkpoint: int = 24
    regress: RegressSettings = field(default_factory=RegressSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require("simulated", self.simulated, 0 <= self.simulated <= 1, "a number from 0 to 1")
        require("checkpoint", self.checkpoint, self.checkpoint >= 1, "1 or more")
        require("width", self.width, 1 <= self.width <= 4096, "an integer from 1 to 4096")
        require("design", self.design, self.design in DESIGNS, " or ".join(DESIGNS))
        if DESIGNS[self.design].prior:
            require(f"prior of design {self.design}", self.prior, self.prior in PRIORS, " or ".join(PRIORS))
            require(f"simulated of design {self.design}", self.simulated, self.simulated == 0, "0")
        else:
            require(f"prior of design {self.design}", self.prior, not self.prior, "none")

    @property
    def simulated_steps(self) -> int:
        """Return the transitions on the simulated GPU."""
        return round(self.simulated * self.steps)


_WITH_PRIOR = {"simulated": 0.0, "prior": PRIORS[0], "budget": 8, "lr": 3e-4, "checkpoint": 5}
#: Design -> settings of ``outblas train --env knobs --design``.
KNOB_RECIPES = {
    "build": KnobSettings(),
    "edit": KnobSettings(design="edit", steps=100_000, **_WITH_PRIOR),  # type: ignore[arg-type]
    "rank": KnobSettings(design="rank", steps=80_000, **_WITH_PRIOR),  # type: ignore[arg-type]
}
