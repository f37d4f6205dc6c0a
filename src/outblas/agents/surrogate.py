"""A regression over all shapes for what to expect, and a Gaussian process for what this problem adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.agents.base import Agent, unexplored
from outblas.agents.surrogate_features import features
from outblas.agents.surrogate_fit import Fitted, covariance, fit
from outblas.config import LAUNCHES, KernelConfig, launch_of
from outblas.evaluation import Evaluation, Status
from outblas.model_terms import Floats
from outblas.problem import Problem
from outblas.recording import Recording
from outblas.roofline import Gpu

#: Without ``prepare``: what the ranking model leaves, as logarithms; fitted, these come from problems left out.
SPREAD, LENGTH, OWN = 0.08, 0.8, 0.04
#: Standard deviation of a launch option's level about the mean of what was measured.
LEVEL = 1.0
#: Standard error of a measured logarithm, and how much slower than predicted a candidate that failed counts.
NOISE, FAILED = 0.005, math.log(4.0)


class Surrogate(Agent):
    """Expected improvement of log time, launch options in turns.

    The prior mean is a regression fitted by :meth:`prepare` (:mod:`outblas.agents.surrogate_fit`), or the packaged
    ranking model until then. What the present problem's measurements leave of it is a Gaussian process (Rasmussen and
    Williams, Gaussian Processes for Machine Learning, 2006, eq. 2.25-2.26): a level for each launch option, a
    squared-exponential kernel over the features, and a part of each candidate's own. Proposed is the candidate, of the
    launch option tried least so far, whose expected improvement on the best of that option is largest (Jones et al.,
    Efficient Global Optimization, 1998, eq. 15); in a batch, a chosen one counts as measured with its expected time.
    """

    draws = False

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._fitted: Fitted | None = None

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Fit on recorded problems: 800 of them take a minute or so on one core.

        Raises:
            UsageError: a problem is not in the recording, or too few of them have anything to learn from.
            ToolchainMissing: torch is not installed; proposals do not need it.
        """
        self._fitted = fit(recording, problems, self.gpu)

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        if not left or n < 1:
            return []
        tried = [e.config for e in history]
        state = _State(*self._prior([*tried, *left], problem), history)
        while len(state.tried) < len(tried) + min(n, len(left)):
            state.choose()
        return [left[i - len(tried)] for i in state.tried[len(tried) :]]

    def _prior(self, configs: Sequence[KernelConfig], problem: Problem) -> tuple[Floats, Floats, list[int]]:
        """Expected log time, covariance, and launch option of each config."""
        launches = [LAUNCHES.index(launch_of(config)) for config in configs]
        found = features(problem, configs, self.gpu)
        if self._fitted is None:
            from outblas.model import predict_many

            mean = np.log(predict_many(problem, configs, self.gpu))
            # Standardised over what is at hand: nothing else is known of the features' sizes.
            places = (found - found.mean(axis=0)) / np.maximum(found.std(axis=0), 1e-6)
            spread, length, own = SPREAD, LENGTH, OWN
        else:
            mean, places = self._fitted.mean(found), self._fitted.places(found)
            spread, length, own = self._fitted.spread, self._fitted.length, self._fitted.own
        same = np.equal.outer(launches, launches)
        kernel = covariance(places, spread, length) + LEVEL**2 * same + own**2 * np.eye(len(configs))
        return mean, kernel, launches


class _State:
    """The posterior, as proposals are added to what was measured.

    Args:
        mean, kernel, launches: of the candidates tried, in the order of ``history``, then of those left.
    """

    def __init__(self, mean: Floats, kernel: Floats, launches: Sequence[int], history: Sequence[Evaluation]) -> None:
        self.mean, self.kernel, self.launches = mean, kernel, np.array(launches)
        self.tried = list(range(len(history)))
        self.proven = np.zeros(len(mean), dtype=bool)
        self.proven[: len(history)] = [e.status is Status.PASSED for e in history]
        self.times = np.full(len(mean), np.nan)
        self.times[self.proven] = _times([e for e in history if e.status is Status.PASSED])
        level = self._levels()
        for i in self.tried:
            if not self.proven[i]:
                self.times[i] = mean[i] + level[i] + FAILED

    def _levels(self) -> Floats:
        """How much slower than the prior mean the proven ones of each candidate's launch option are: float64[configs].

        The prior mean is known up to a constant of the problem and the option; 0 where none was proven.
        """
        levels = np.zeros(len(self.mean))
        for launch in set(self.launches.tolist()):
            mine = self.launches == launch
            if (self.proven & mine).any():
                levels[mine] = (self.times - self.mean)[self.proven & mine].mean()
        return levels

    def choose(self) -> None:
        """Add the candidate of largest expected improvement, as if it had taken its expected time."""
        left = np.setdiff1d(np.arange(len(self.mean)), self.tried)
        tries = np.bincount(self.launches[self.tried], minlength=len(LAUNCHES))
        turn = min(set(self.launches[left].tolist()), key=lambda launch: (tries[launch], launch))
        left = left[self.launches[left] == turn]
        expected, deviation = self._posterior(left)
        rivals = self.times[self.proven & (self.launches == turn)]
        gain = improvement(expected, deviation, float(rivals.min())) if len(rivals) else np.zeros(len(left))
        # By the expected time where nothing was proven yet, and where no gain can be told from none.
        place = int(gain.argmax() if gain.max() > 1e-12 else expected.argmin())
        chosen = int(left[place])
        self.tried.append(chosen)
        self.times[chosen], self.proven[chosen] = expected[place], True

    def _posterior(self, left: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Expected log time and its standard deviation."""
        prior, variance = self.mean + self._levels(), np.diag(self.kernel)[left]
        if not self.tried:
            return prior[left], np.sqrt(variance)
        known = np.array(self.tried)
        among = self.kernel[known][:, known] + NOISE**2 * np.eye(len(known))
        across = self.kernel[known][:, left]
        weights = np.linalg.solve(among, across)
        expected = prior[left] + weights.T @ (self.times - prior)[known]
        return expected, np.sqrt(np.maximum(variance - (across * weights).sum(axis=0), 1e-12))


def improvement(expected: Floats, deviation: Floats, best: float) -> Floats:
    """Expected improvement of a minimum: E[max(best - y, 0)] of y ~ N(expected, deviation^2); float64[configs]."""
    z = (best - expected) / deviation
    below = np.array([0.5 * math.erfc(-float(x) / math.sqrt(2)) for x in z])
    return np.maximum(deviation * (z * below + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)), 0.0)


def _times(passed: Sequence[Evaluation]) -> list[float]:
    """Logarithms of time: over the baseline of the same rounds where all have one, else of microseconds."""
    ratios = [e.speedup.ratio for e in passed if e.speedup is not None]
    if len(ratios) == len(passed):
        return [-math.log(ratio) for ratio in ratios]
    return [math.log(e.timing.median_us) for e in passed if e.timing is not None]
