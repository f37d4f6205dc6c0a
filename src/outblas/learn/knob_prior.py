"""Believed times with which a design over knobs may begin, before any measurement of the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost import cost_model
from outblas.learn.features import candidate_features, knob_columns, problem_features
from outblas.learn.policy import CandidateView, Policy
from outblas.learn.posterior import Floats, Regressor, posterior

#: Sources of believed times. ``regressor`` is that of agent ``regressor``. ``model`` is the cost model with the
#: coefficients from which its fit starts. No measurement is in it.
PRIORS = ("regressor", "model")
#: Errors of guessed log times: their standard deviation within a problem, on recorded kernels that are at most 35%
#: slower than the best. The problems are 80 training problems of split families, recording h200.
REGRESSOR_ERROR, MODEL_ERROR = 0.02, 0.12


@dataclass(frozen=True)
class PriorView:
    """The kernels of a problem as a prior sees them.

    Attributes:
        kernels: the kernels with their guessed log times.
        error: error of the guesses, in log time.
    """

    kernels: CandidateView
    error: float

    def believed(self, proven: Sequence[int], log_us: Sequence[float]) -> Floats:
        """Return believed log times over the error, float64[C], corrected by measurements.

        The correction is :func:`outblas.learn.posterior.posterior`.

        Args:
            proven: indices of the measured kernels that passed.
            log_us: natural logs of their times in us, in that order.
        """
        return posterior(self.kernels.guess, self.kernels.knobs, proven, log_us)[0] / self.error


@dataclass(frozen=True)
class KnobPrior:
    """Believed times of kernels.

    Attributes:
        regressor: predicts them. None: the cost model with the coefficients from which its fit starts.
    """

    regressor: Regressor | None = None

    def view(self, problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> PriorView:
        """Return the kernels of a problem before any measurement, in the order given."""
        if self.regressor is not None:
            return PriorView(Policy(self.regressor, {}).view(problem, configs, gpu), REGRESSOR_ERROR)
        each = candidate_features(problem, configs, gpu)
        start = cost_model.start_coefficients(gpu)
        guess = np.log(cost_model.predict_with(start, None, problem, configs, gpu))
        none = np.zeros(len(guess))
        return PriorView(
            CandidateView(problem_features(problem, gpu), each, guess, none, knob_columns(each)), MODEL_ERROR
        )
