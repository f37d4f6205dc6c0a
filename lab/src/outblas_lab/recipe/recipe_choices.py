"""Choices of a trained policy: it measures a few candidates, and the one with the highest reward is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outblas.core.evaluation import Evaluation, Status
from outblas_lab.compare.held_out import HeldOutTask
from outblas_lab.train.policy import Policy
from outblas_lab.train.policy_quality import search_order
from outblas_lab.train.recipe_evaluator import RecipeEvaluator
from outblas_lab.train.reward import reward

#: Outcomes of a choice, see :class:`Choice`.
OUTCOMES = ("faster", "level", "wrong", "none")


@dataclass(frozen=True)
class Choice:
    """The candidate with the highest reward after a number of measurements.

    Attributes:
        quality: time of the task's fastest right candidate / time of the choice, above 0, at most 1. A choice that
            failed counts as the slowest right candidate.
        right: True if the choice passes.
        outcome: ``none``: its reward is 0 or less, so cuBLAS stays. ``wrong``: the choice failed a gate. ``level``: it
            is right, and not surely faster than the fastest baseline (the lower bound of its speed-up is 1 or less).
            ``faster``: it is right and surely faster.
    """

    quality: float
    right: bool
    outcome: str


class JudgedTask(NamedTuple):
    """The key of a task, and its choices: one for each budget."""

    key: tuple[str, str]
    choices: list[Choice]


def judge_policy(
    policy: Policy, evaluator: RecipeEvaluator, tasks: Sequence[HeldOutTask], preset: str, budgets: Sequence[int]
) -> list[JudgedTask]:
    """Let a policy search tasks, and choose by the reward of its training.

    A task without a right candidate is left out.

    Args:
        policy: the policy. It measures its highest score every time.
        evaluator: answers from the recording.
        tasks: problems and launch options.
        preset: name of the reward.
        budgets: numbers of measurements, ascending, 1 or more.
    """
    judged = []
    for task in tasks:
        found = evaluator.evaluate((task.problem, config) for config in task.candidates)
        us = np.array([e.timing.median_us if e.timing is not None else np.inf for e in found])
        if np.isfinite(us).any():
            view = policy.view(task.problem, task.candidates, evaluator.gpu)
            order = search_order(policy, view, us, min(budgets[-1], len(us)))
            judged.append(JudgedTask(task.key, [_choice(found, us, order[:b], preset) for b in budgets]))
    return judged


def _choice(found: Sequence[Evaluation], us: np.ndarray, measured: Sequence[int], preset: str) -> Choice:
    """Return the choice among measured candidates; of equal rewards the first counts."""
    rewards = [reward(found[i], preset) for i in measured]
    best = measured[int(np.argmax(rewards))]
    right = us[np.isfinite(us)]
    quality = float(right.min() / (us[best] if np.isfinite(us[best]) else right.max()))
    return Choice(quality, bool(np.isfinite(us[best])), _outcome(found[best], max(rewards)))


def _outcome(evaluation: Evaluation, paid: float) -> str:
    if paid <= 0:
        return "none"
    if evaluation.status is not Status.PASSED:
        return "wrong"
    return "faster" if evaluation.speedup is not None and evaluation.speedup.low > 1 else "level"
