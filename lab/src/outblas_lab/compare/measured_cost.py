"""GPU time of measurements that a replay answers, modelled, so that searches can be compared at equal GPU time.

A live search runs each kernel three times before it is timed: twice to load and bind it, and once to be judged. Its
graph of ``repeats`` calls then runs once untimed and once per round. So a measurement takes

    microseconds per call x (3 + repeats x (1 + rounds)).

``repeats`` is that of the clock (:func:`outblas.core.roofline.repeats`). A kernel has the rounds of a recording: five,
or three if calls are long. One that is 1.25 times as slow as the best so far has one round. Rounds that a recording
adds near the best are not counted.

Three parts are left out, because they do not depend on the kernel's speed. They are the compilation on the host, the
proof on other problems (about 0.15 s, once per kernel) and the baselines. A failed kernel has no recorded time. It
counts with its three calls, each as long as one of the slowest kernel that passed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outblas.core.evaluation import Evaluation, Timing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, repeats
from outblas_lab.pool.record_suite import LONG_ROUNDS, ROUNDS, SINGLE_SAMPLE_BEYOND
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import IQR_SIGMAS

#: Units of a budget: name -> words.
UNITS = {"measurements": "measurements", "gpu-ms": "ms of the GPU"}
#: Calls of a kernel before its graph.
_CALLS_BEFORE = 3


def usual_rounds(problem: Problem, gpu: Gpu) -> int:
    """Return the rounds of a kernel that is not far behind: five, or three if calls are long."""
    return LONG_ROUNDS if repeats(floor_us(problem, gpu)) == 1 else ROUNDS


def rounds_of_search(problem: Problem, gpu: Gpu, us: float, best_us: float) -> int:
    """Return the rounds that a search gives a kernel.

    Args:
        us: its time per call, microseconds.
        best_us: the best so far; infinity before the first.
    """
    return 1 if us > SINGLE_SAMPLE_BEYOND * best_us else usual_rounds(problem, gpu)


def measurement_ms(problem: Problem, gpu: Gpu, us: float, rounds: int, again: bool = False) -> float:
    """Return the modelled GPU time of one measurement, milliseconds.

    Args:
        us: time per call, microseconds.
        again: the kernel was measured before, so it is loaded and judged.
    """
    return us * ((0 if again else _CALLS_BEFORE) + repeats(floor_us(problem, gpu)) * (1 + rounds)) / 1000


def failure_ms(worst_us: float) -> float:
    """Return the modelled GPU time of a kernel that fails, milliseconds.

    Args:
        worst_us: time per call of the problem's slowest kernel that passed, microseconds.
    """
    return worst_us * _CALLS_BEFORE / 1000


def of_few_rounds(
    recording: Recording, evaluation: Evaluation, rounds: int, before: Sequence[float], seed: int
) -> Evaluation:
    """Return an evaluation as fewer rounds than the recorded ones would have given it, with samples.

    A sample is drawn around the recorded median: its log time is normal, with the deviation that follows from the
    spread. A cell of a single round has no spread; it takes the median one of its problem. The draw depends on the
    kernel, its number of samples and the agent's seed alone, so a resumed comparison repeats it. With as many samples
    as a search usually takes, the recorded median counts: other agents see it after as many rounds.

    Args:
        evaluation: a passed cell of the recording, or a failed one, which is returned as it is.
        before: microseconds of the kernel's earlier samples, which count, too.
        seed: the agent's; its runs with other seeds see other samples.
    """
    if evaluation.timing is None:
        return evaluation
    problem, us = evaluation.problem, evaluation.timing.median_us
    rng = np.random.default_rng([*f"{seed}/{problem.key}/{evaluation.config.name}/{len(before)}".encode()])
    drawn = us * np.exp(_spread(recording, evaluation) / IQR_SIGMAS * rng.standard_normal(rounds))
    samples = (*before, *drawn.tolist())
    median = us if len(samples) >= usual_rounds(problem, recording.gpu) else float(np.median(samples))
    speedup = evaluation.speedup
    if speedup is not None:
        shift = us / median
        low, high = speedup.low * shift, speedup.high * shift
        speedup = replace(speedup, ratio=speedup.ratio * shift, low=low, high=high)
    return replace(evaluation, timing=Timing("offline", samples, median, evaluation.timing.spread), speedup=speedup)


def _spread(recording: Recording, evaluation: Evaluation) -> float:
    row, column = recording.row(evaluation.problem), recording.catalogue_index(evaluation.config)
    if recording.rounds[row, column] > 1:
        return float(recording.spread[row, column])
    known = recording.spread[row][recording.rounds[row] > 1]
    return float(np.median(known)) if len(known) else 0.0


def finished(ends: Sequence[float], budget: int, unit: str) -> int:
    """Return the number of measurements that a budget allows.

    Args:
        ends: GPU milliseconds until the end of each measurement, ascending.
        unit: a key of :data:`UNITS`.
    """
    if unit == "measurements":
        return budget
    return bisect_right(ends, budget) if budget else 0
