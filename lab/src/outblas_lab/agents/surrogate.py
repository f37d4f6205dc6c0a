"""Expected improvement on predicted times: learned across shapes, corrected by this problem's measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.features import candidate_features, knob_columns, problem_features
from outblas.predict.posterior import Regressor, expected_improvement, posterior
from outblas.tune.agents.base import unexplored
from outblas_lab.agents.launch_turns import LaunchTurns, LearnsAcross
from outblas_lab.train.policy import CandidateView, Policy

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import TrainingPart

#: A failed candidate counts as slower than expected by this logarithm.
FAILED_LOG_SLOWDOWN = math.log(4.0)


class Surrogate(LearnsAcross, LaunchTurns):
    """Expected improvement (Bayesian) on a model learned across shapes.

    The objective is log time. Each launch option is a separate search, and they take turns. The prediction is that of
    the regressor trained in :meth:`prepare`, else of the packaged ranking model. This problem's measurements correct it
    (:mod:`outblas.predict.posterior`).

    The candidate with the largest expected improvement on the best of its option is next (Jones et al., Efficient
    Global Optimization, 1998). Until one of its option has passed, the shortest expected time is next. A failed
    candidate counts as 4 times slower than expected. Within a batch, a chosen one counts as measured at its expected
    time.
    """

    draws, learns, across = False, True, True

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._regressor: Regressor | None = None

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Train the regressor of agent ``ppo`` with the same seed, or read it from the cache; return None.

        It uses the same part of the problems as the regressor of ``ppo``. So the two agents differ in their use of a
        prediction and not in the prediction.

        Raises:
            UsageError: a problem is not in its recording, or none has two proven cells.
            ToolchainMissing: torch is not installed; proposals do not need it.
        """
        from outblas_lab.train.regression import regressor_of_ppo

        self._regressor = regressor_of_ppo(parts, self.seed)

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        if not unexplored(group, history):
            return []
        search = _Search(self._view(problem, group), group, history)
        return [group[i] for i in search.choose(n)]

    def _view(self, problem: Problem, group: Sequence[KernelConfig]) -> CandidateView:
        if self._regressor is not None:
            return Policy(self._regressor, {}).view(problem, group, self.gpu)
        from outblas.kernels.cost.cost_model import predict_many

        each, guess = candidate_features(problem, group, self.gpu), np.log(predict_many(problem, group, self.gpu))
        return CandidateView(problem_features(problem, self.gpu), each, guess, np.zeros(len(guess)), knob_columns(each))


class _Search:
    """Predicted log times of one launch option's candidates, updated with each chosen one."""

    def __init__(self, view: CandidateView, group: Sequence[KernelConfig], history: Sequence[Evaluation]) -> None:
        place = {config: i for i, config in enumerate(group)}
        seen = [e for e in history if e.config in place]
        passed = [e for e in seen if e.status is Status.PASSED]
        failed = [place[e.template] for e in seen if e.status is not Status.PASSED]
        proven, times = [place[e.template] for e in passed], _times(passed)
        # The guess is up to a constant, which may be larger than the belief's prior has it: as the proven ones say.
        level = float(np.mean(np.array(times) - view.guess[proven])) if proven else 0.0
        self._guess, self._knobs = view.guess + level, view.knobs
        self._tried = [*proven, *failed]
        self._times = [*times, *(float(self._guess[i]) + FAILED_LOG_SLOWDOWN for i in failed)]
        self._best = min(times, default=math.inf)

    def choose(self, n: int) -> list[int]:
        """Return indices of the next ``n`` candidates; fewer if no more are left.

        Each choice assumes that the choices before it took their expected times.
        """
        left = np.setdiff1d(np.arange(len(self._guess)), self._tried)
        chosen: list[int] = []
        while len(chosen) < n and len(left):
            mean, deviation = (of[left] for of in posterior(self._guess, self._knobs, self._tried, self._times))
            gain = (
                expected_improvement(mean, deviation, self._best) if math.isfinite(self._best) else np.zeros(len(left))
            )
            # The expected time decides if nothing is proven yet or every gain is about zero.
            i = int(gain.argmax() if gain.max() > 1e-12 else mean.argmin())
            chosen.append(int(left[i]))
            self._tried.append(int(left[i]))
            self._times.append(float(mean[i]))
            self._best = min(self._best, float(mean[i]))
            left = np.delete(left, i)
        return chosen


def _times(passed: Sequence[Evaluation]) -> list[float]:
    """Return log times: over the baseline of the same rounds if every evaluation has one, else of microseconds."""
    ratios = [e.speedup.ratio for e in passed if e.speedup is not None]
    if len(ratios) == len(passed):
        return [-math.log(ratio) for ratio in ratios]
    return [math.log(e.timing.median_us) for e in passed if e.timing is not None]
