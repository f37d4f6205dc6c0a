"""The reward of an agent: Evaluation -> float.

Correctness is a gate, never a term. A failed candidate gets less than any proven one, graded by the gate that it
reached. A proven one gets the clipped log of its speed-up. The lower confidence bound is used so that luck earns
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from outblas.core.errors import UsageError, unknown_name
from outblas.core.evaluation import FAILURES, Evaluation, Status

#: Speed-ups outside [1/e, e] earn no more and no less than at the edge.
MAX_LOG_REWARD = 1.0


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
        if evaluation.speedup is None:
            raise UsageError("an evaluation without a speed-up", "baselines timed in the same rounds", "time them too")
        return max(-MAX_LOG_REWARD, min(MAX_LOG_REWARD, math.log(evaluation.speedup.low)))
    return -2 * MAX_LOG_REWARD + MAX_LOG_REWARD * FAILURES.index(evaluation.status) / len(FAILURES)


def additive_reward(evaluation: Evaluation) -> float:
    """Return the published reward 0.8 r_perf + 0.15 r_l2 + 0.05 r_correct; kept only to show its fault.

    r_perf is the speed-up over the best baseline, r_l2 the L2 hit rate (counter ``l2_hit_rate``, 0..1), and r_correct 1
    or 0. The evaluation of a failed kernel has no time. The recipe uses the time that the kernel would claim, from the
    counter ``unproven_speedup``. So a wrong kernel earns more than a right one once it is 0.05 / 0.8 = 6.25% faster.
    """
    if evaluation.status is Status.PASSED and evaluation.speedup is not None:
        perf, correct = evaluation.speedup.ratio, 1.0
    else:
        perf, correct = evaluation.counters.get("unproven_speedup", 0.0), 0.0
    return 0.8 * perf + 0.15 * evaluation.counters.get("l2_hit_rate", 0.0) + 0.05 * correct


PRESETS: dict[str, Callable[[Evaluation], float]] = {"gated": gated_reward, "additive": additive_reward}


def reward(evaluation: Evaluation, preset: str = "gated") -> float:
    """Return the reward of one evaluation under a named preset, ``gated`` or ``additive``.

    Raises:
        UsageError: an unknown preset, a candidate that was left out, or, by ``gated``, a proven one without a speed-up.
    """
    if preset not in PRESETS:
        raise unknown_name("reward", preset, PRESETS, "pass one of them")
    if evaluation.status is Status.LEFT_OUT:
        raise UsageError("a candidate that was left out", "one that was tried", "offer recorded candidates only")
    return PRESETS[preset](evaluation)
