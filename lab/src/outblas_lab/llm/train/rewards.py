"""Evaluation -> named parts of a reward, and the advantages of a group: pure functions, no torch.

Correctness is a gate, as in :mod:`outblas_lab.train.reward`: what failed gets less than anything that was proven,
graded only by how far it came. The parts add up to the reward, and each is logged by its name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Union

from outblas.core.evaluation import FAILURES, Evaluation, Status
from outblas.core.roofline import Gpu
from outblas_lab.jail.plausibility import is_below_floor
from outblas_lab.train.reward import MAX_LOG_REWARD, gated_reward

#: What a missed step before the proof costs, beside what the failure itself costs.
MISSED_STEP_COST = 0.25
#: What a kernel gets whose proof nobody ran (compiled only): above every failure, below every proven kernel.
UNPROVEN_REWARD = -MAX_LOG_REWARD
#: Largest magnitude of a speed-up's logarithm that counts; beyond it the reward is flat.
LOG_CLIP = 3.0
#: The last status that a candidate may have without having been compiled, and without having passed the static gate.
_NOT_COMPILED = (Status.ILLEGAL, Status.COMPILE_ERROR)


@dataclass(frozen=True)
class RefusedAnswer:
    """An answer without a candidate: no code, a broken launch block, an illegal config, or a text outside the language.

    Attributes:
        reason: the reason in words; for ``refusal`` the model's own text. It may be "" for ``empty``.
        kind: ``empty``, ``refusal``, ``malformed``, ``contract`` or ``illegal``.
    """

    reason: str
    kind: str = "malformed"


@dataclass(frozen=True)
class RewardParts:
    """A reward in parts; their sum, the property ``total``, is the reward.

    Attributes:
        format: 0 if the answer is a candidate, else -0.25.
        compiled: 0 if it compiled, else -0.25.
        static: 0 if it passed the static gate, else -0.25.
        correct: 0 if proven. For a failure, ``outblas_lab.train.reward.gated_reward``, in [-2, -1). -1 if nobody ran
            it.
        speed: :func:`speed_reward` of a proven kernel in a stage that rewards speed; else 0.
    """

    format: float = 0.0
    compiled: float = 0.0
    static: float = 0.0
    correct: float = 0.0
    speed: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PART_NAMES)


PART_NAMES: tuple[str, ...] = tuple(field.name for field in fields(RewardParts))


def reward_parts(answer: Union[Evaluation, RefusedAnswer], timed: bool, gpu: Gpu) -> RewardParts:
    """Return the reward of one answer in parts.

    Args:
        answer: an evaluation, or a refused answer, which gets -0.25 in the first three and ``correct`` -2.
        timed: the stage rewards speed; False: every proven kernel gets 0.
        gpu: a proven time below this GPU's floor counts as a broken rule: ``correct`` is -2 + 10 / 11.

    Returns:
        Parts whose total is -2.75 for a refused answer and -1 for one that was compiled only (LEFT_OUT). A failure gets
        less than -1, a proven kernel -1 to 1. Parts that are not named here are 0.
    """
    if isinstance(answer, RefusedAnswer):
        return RewardParts(-MISSED_STEP_COST, -MISSED_STEP_COST, -MISSED_STEP_COST, -2 * MAX_LOG_REWARD)
    if answer.status is Status.LEFT_OUT:
        return RewardParts(correct=UNPROVEN_REWARD)
    if answer.status is Status.PASSED and is_below_floor(answer, gpu):  # an impossible time counts as a broken rule
        return RewardParts(
            correct=-2 * MAX_LOG_REWARD + MAX_LOG_REWARD * FAILURES.index(Status.RULE_BROKEN) / len(FAILURES)
        )
    if answer.status is Status.PASSED:
        return RewardParts(speed=speed_reward(answer) if timed else 0.0)
    compiled = -MISSED_STEP_COST if answer.status in _NOT_COMPILED else 0.0
    static = -MISSED_STEP_COST if answer.status in (*_NOT_COMPILED, Status.STATIC_REJECTED) else 0.0
    return RewardParts(0.0, compiled, static, gated_reward(answer))


def speed_reward(evaluation: Evaluation) -> float:
    """Return tanh(log s) of the lower bound s of the speed-up: between -1 and 1, 0 at parity, slope 1 there.

    The natural log is limited to [-3, 3]. The function is smooth, so that every gain in speed counts. It takes the
    lower bound, so that luck is not rewarded. It is 0 if no baseline was timed beside the kernel.
    """
    if evaluation.speedup is None:
        return 0.0
    low = max(math.exp(-LOG_CLIP), evaluation.speedup.low)  # this order turns NaN into the least value
    return MAX_LOG_REWARD * math.tanh(min(LOG_CLIP, math.log(low)) / MAX_LOG_REWARD)


def advantages(
    rewards: Sequence[float | None], group: int, least_std: float = 0.05, clip: float = 2.0
) -> list[float | None]:
    """Return (reward - mean) / std of each answer, clipped; mean and std are of the other answers of its group.

    GRPO (Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2) has the answer itself in both, which makes the
    gradient biased. The mean of the others does not (Kool et al., Buy 4 REINFORCE samples, 2019). There are two guards.
    A std below ``least_std`` counts as ``least_std``, so that timing noise in a group of equals is not scaled
    up. One outlier gets at most ``clip``.

    Example: ``advantages([1.0, 2.0, 3.0], 3)`` is about ``[-2, 0, 2]``: 1 - 2.5 is beyond the clip of 2.

    Args:
        rewards: rewards; None for an unjudged answer, which gets None and counts in no mean. A judged one without
            others gets 0.
        group: answers per prompt, at least 2.
        least_std: smallest standard deviation (of a sample, with n - 1) that counts.
        clip: largest magnitude of a result.

    Raises:
        ValueError: the number of rewards is no multiple of ``group``, or ``group`` is below 2.
    """
    if group < 2 or len(rewards) % group:
        raise ValueError(f"{len(rewards)} rewards do not form complete groups of {group}")
    found: list[float | None] = []
    for start in range(0, len(rewards), group):
        members = rewards[start : start + group]
        for place, own in enumerate(members):
            others = [r for i, r in enumerate(members) if r is not None and i != place]
            mean = statistics.fmean(others) if others else own
            scale = max(least_std, statistics.stdev(others) if len(others) > 1 else 0.0)
            found.append(None if own is None or mean is None else max(-clip, min(clip, (own - mean) / scale)))
    return found
