"""Replay: an evaluator that answers from a recording. It is the default on machines without a GPU.

It offers recorded cells only and never interpolates. A request for another cell is an error, except for
:class:`LenientReplay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from outblas.core.config import Candidate, KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.rivals import fastest_baseline
from outblas.core.roofline import Gpu
from outblas.kernels.legality import why_illegal
from outblas_lab.recordings.recording import STATUSES, Recording

#: (Standard error of a median) / (standard error of a mean) for normal samples: sqrt(pi / 2).
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
#: Interquartile range of a normal distribution, in standard deviations.
IQR_SIGMAS = 1.349
_Z95 = 1.96


class ReplayEvaluator(Evaluator):
    """Evaluator that answers from a recording instead of a GPU.

    A recording has medians and spreads, not paired samples, so the speedup is an approximation: (median of the best
    baseline / median of the candidate). Its 95% interval is exp(log ratio -+ 1.96 sqrt(s_b^2 + s_c^2)).
    Here s = sqrt(pi/2) (spread / 1.349) / sqrt(rounds), the standard error of the log of a median of normal samples. It
    ignores the interleaving of rounds, so it is wider than the paired bootstrap interval if clocks drift.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._gpu = recording.gpu

    @property
    def gpu(self) -> Gpu:
        return self._gpu

    @property
    def source(self) -> str:
        return f"replay:{self._gpu.name}"

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return the recorded candidates of a problem, in catalogue order.

        Raises:
            UsageError: the problem was not recorded.
        """
        catalogue = self.recording.catalogue
        return [catalogue[i] for i in np.flatnonzero(self.recording.recorded_mask(problem))]

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> list[Evaluation]:
        """Return the recorded evaluations of the pairs, in their order.

        Raises:
            UsageError: a pair was not recorded.
        """
        return [self._cell(problem, config) for problem, config in pairs]

    def baselines(self, problem: Problem) -> dict[str, float]:
        """Return baseline name -> microseconds, as measured in the recording's run, e.g. ``{"torch": 8.3, "lt_auto":
        7.9}``.
        """
        return self.recording.baselines_of(problem)

    def baseline_detail(self, problem: Problem, name: str) -> str:
        """Return one line on a baseline, e.g. the chosen algorithm; empty if it was not measured for the problem.

        Args:
            name: a name of :data:`outblas.core.rivals.BASELINE_NAMES`, e.g. ``lt_auto``. Another raises KeyError.
        """
        return self.recording.baseline_detail[name][self.recording.row(problem)]

    def _cell(self, problem: Problem, config: Candidate) -> Evaluation:
        """Return the evaluation of one cell. Raises UsageError if it was illegal, left out, or not in the recording."""
        recording = self.recording
        row, column = recording.row(problem), recording.catalogue_index(config)
        status = Status.LEFT_OUT if column is None else STATUSES[recording.status[row, column]]
        if column is None or status in (Status.LEFT_OUT, Status.ILLEGAL):
            wrong = f"{config_name(config)} on {problem.key} was not recorded"
            do = "use a recorded candidate, or tune on a live GPU"
            raise UsageError(wrong, "a recorded cell (a replay never interpolates)", do)
        baselines = self.baselines(problem)
        if status is not Status.PASSED:
            return Evaluation(problem, config, status, "recorded", Verdict(status), baselines_us=baselines)
        median, spread = float(recording.median_us[row, column]), float(recording.spread[row, column])
        rounds = int(recording.rounds[row, column])
        name = fastest_baseline(baselines)
        error = math.hypot(
            standard_error(spread, rounds), standard_error(float(recording.baseline_spread[name][row]), rounds)
        )
        ratio, width = baselines[name] / median, math.exp(_Z95 * error)
        return Evaluation(
            problem, config, status, verdict=Verdict(status), timing=Timing("offline", (), median, spread),
            baselines_us=baselines, speedup=Speedup(name, ratio, ratio / width, ratio * width),
        )  # fmt: skip


class LenientReplay(ReplayEvaluator):
    """A replay for kernels that nobody chose from the recorded ones, such as those of a language model.

    A kernel that is not recorded gets the status ``illegal``, or ``left_out`` if it is legal. It is not timed.
    """

    def _cell(self, problem: Problem, config: Candidate) -> Evaluation:
        column = self.recording.catalogue_index(config)
        if column is not None and self.recording.recorded_mask(problem)[column]:
            return super()._cell(problem, config)
        reason = why_illegal(problem, config, self.gpu) if isinstance(config, KernelConfig) else None
        status, why = (Status.ILLEGAL, reason) if reason else (Status.LEFT_OUT, "not recorded")
        return Evaluation(problem, config, status, why, Verdict(status, (), why))


def standard_error(spread: float, rounds: int) -> float:
    """Return the standard error of the log of a median of ``rounds`` normal samples.

    Args:
        spread: interquartile range / median.
        rounds: number of samples, at least 1.
    """
    return _MEDIAN_FACTOR * spread / IQR_SIGMAS / math.sqrt(rounds)
