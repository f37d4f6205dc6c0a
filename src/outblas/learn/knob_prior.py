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

#: Sources of believed times: the regressor of agent ``regressor``, or the cost model with the coefficients from which
#: its fit starts, in which no measurement is.
PRIORS = ("regressor", "model")


@dataclass(frozen=True)
class KnobPrior:
    """Believed times of kernels.

    Attributes:
        regressor: predicts them. None: the cost model with the coefficients from which its fit starts.
    """

    regressor: Regressor | None = None

    def view(self, problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> CandidateView:
        """Return the kernels of a problem with their believed times before any measurement, in the order given."""
        if self.regressor is not None:
            return Policy(self.regressor, {}).view(problem, configs, gpu)
        each = candidate_features(problem, configs, gpu)
        start = cost_model.start_coefficients(gpu)
        guess = np.log(cost_model.predict_with(start, None, problem, configs, gpu))
        return CandidateView(problem_features(problem, gpu), each, guess, np.zeros(len(guess)), knob_columns(each))


def believed_times(view: CandidateView, proven: Sequence[int], log_us: Sequence[float]) -> Floats:
    """Return believed log times, float64[C], corrected by measurements (:func:`outblas.learn.posterior.posterior`).

    Args:
        view: the kernels, from :meth:`KnobPrior.view`.
        proven: indices of the measured kernels that passed.
        log_us: natural logs of their times in us, in that order.
    """
    return posterior(view.guess, view.knobs, proven, log_us)[0]
