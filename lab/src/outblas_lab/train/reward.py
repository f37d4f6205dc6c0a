"""The reward of an agent: Evaluation -> float.

Correctness is a gate, never a term. A failed candidate gets less than any proven one, graded by the gate that it
reached. A proven one gets the clipped log of its speed-up. The lower confidence bound is used so that luck earns
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from outblas.core.errors import UsageError, unknown_name
from outblas.core.evaluation import FAILURES, Evaluation, Speedup, Status

#: Speed-ups outside [1/e, e] earn no more and no less than at the edge.
MAX_LOG_REWARD = 1.0
#: Weights of the published reward, and the L2 hit rate that earns its whole term.
PERF_WEIGHT, L2_WEIGHT, CORRECT_WEIGHT, FULL_HIT_RATE = 0.8, 0.15, 0.05, 0.9
#: Counters that it reads: the hit rate, and the speed over cuBLAS that a failed kernel would claim.
HIT_RATE, CLAIMED_SPEED = "l2_hit_rate", "unproven_speedup"


def gated_reward(evaluation: Evaluation) -> float:
    """Return the reward of the preset ``gated``, from -2 to 1.

    A proven candidate gets the natural log of its speed-up's lower bound, clipped to [-1, 1]. A failed one gets -2 + i
    / 11, where i is the place of its status in :data:`outblas.core.evaluation.FAILURES`. So ``illegal`` gets -2,
    ``wrong`` -2 + 8/11.

    Raises:
        UsageError: a proven candidate has no speed-up.
        ValueError: the candidate was left out.
    """
    if evaluation.status is Status.PASSED:
        return max(-MAX_LOG_REWARD, min(MAX_LOG_REWARD, math.log(_speedup(evaluation).low)))
    return -2 * MAX_LOG_REWARD + MAX_LOG_REWARD * FAILURES.index(evaluation.status) / len(FAILURES)


def additive_reward(evaluation: Evaluation) -> float:
    """Return the published reward 0.8 r_perf + 0.15 r_l2 + 0.05 r_correct; kept only to show its fault.

    r_perf is cuBLAS's time / the kernel's time, minus 1. r_l2 is the L2 hit rate (counter ``l2_hit_rate``, 0 to 1) over
    0.9, and 0 without a hit rate. r_correct is 1 or 0. If cuBLAS was not timed, the fastest baseline takes its place.

    The evaluation of a failed kernel has no time. The recipe uses the speed over cuBLAS that the kernel would claim,
    counter ``unproven_speedup``; without a claim r_perf is -1. So a wrong kernel can earn more than a right one with
    the same hit rate. Its claim has to be higher by 0.05 / 0.8 = 6.25% of cuBLAS's speed.
    """
    correct, cublas = evaluation.status is Status.PASSED, evaluation.baselines_us.get("cublas")
    if not correct:
        speed = evaluation.counters.get(CLAIMED_SPEED, 0.0)
    elif cublas is not None and evaluation.timing is not None:
        speed = cublas / evaluation.timing.median_us
    else:
        speed = _speedup(evaluation).ratio
    hits = evaluation.counters.get(HIT_RATE, 0.0) / FULL_HIT_RATE
    return PERF_WEIGHT * (speed - 1) + L2_WEIGHT * hits + CORRECT_WEIGHT * correct


def _speedup(evaluation: Evaluation) -> Speedup:
    if evaluation.speedup is None:
        wrong = "the evaluation contains no speedup figure"
        raise UsageError(wrong, "baselines timed in the same rounds", "time baselines too")
    return evaluation.speedup


PRESETS: dict[str, Callable[[Evaluation], float]] = {"gated": gated_reward, "additive": additive_reward}


def reward(evaluation: Evaluation, preset: str = "gated") -> float:
    """Return the reward of one evaluation under a named preset, ``gated`` or ``additive``.

    Raises:
        UsageError: an unknown preset, a candidate that was left out, or a proven one without a speed-up.
    """
    if preset not in PRESETS:
        raise unknown_name("reward", preset, PRESETS, "pass one of them")
    if evaluation.status is Status.LEFT_OUT:
        raise UsageError("the candidate was left out", "an evaluated candidate", "offer recorded candidates only")
    return PRESETS[preset](evaluation)
