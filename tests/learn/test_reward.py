from __future__ import annotations

import dataclasses
import math

import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import FAILURES, Status
from outblas_lab.train.reward import reward
from support.helpers import failed_evaluation, passed_evaluation, synthetic_catalogue, synthetic_problems

PROBLEM, CONFIG = synthetic_problems()[0], synthetic_catalogue()[0]


def test_a_proven_kernel_earns_the_log_of_its_lower_bound() -> None:
    assert reward(passed_evaluation(PROBLEM, CONFIG, low=1.1, ratio=1.3)) == math.log(1.1)


@pytest.mark.parametrize(("low", "expected"), [(100.0, 1.0), (0.001, -1.0)])
def test_the_log_is_clipped(low: float, expected: float) -> None:
    assert reward(passed_evaluation(PROBLEM, CONFIG, low=low, ratio=low)) == expected


def test_failures_are_graded_by_how_far_they_came_and_below_every_proven_kernel() -> None:
    rewards = [reward(failed_evaluation(PROBLEM, CONFIG, status)) for status in FAILURES]
    assert rewards == sorted(set(rewards))
    slowest = reward(passed_evaluation(PROBLEM, CONFIG, low=1e-6, ratio=1e-6))
    assert all(-2 <= r < slowest for r in rewards)


def test_a_claim_of_speed_does_not_help_a_wrong_kernel() -> None:
    wrong = failed_evaluation(PROBLEM, CONFIG)
    boasting = dataclasses.replace(wrong, counters={"unproven_speedup": 50.0, "l2_hit_rate": 1.0})
    assert reward(boasting) == reward(wrong)


def test_a_wrong_kernel_wins_under_the_additive_recipe() -> None:
    """The fault for which the recipe is not the default: 7% of speed outweigh correctness."""
    right = passed_evaluation(PROBLEM, CONFIG, low=0.99, ratio=1.0)
    wrong = dataclasses.replace(
        failed_evaluation(PROBLEM, CONFIG), counters={"unproven_speedup": 1.07, "l2_hit_rate": 0.5}
    )
    assert reward(wrong, "additive") > reward(right, "additive")
    assert reward(wrong) < reward(right)


def test_the_additive_recipe_is_the_published_sum() -> None:
    e = passed_evaluation(PROBLEM, CONFIG, ratio=1.5)
    assert reward(e, "additive") == pytest.approx(0.8 * (1.5 - 1) + 0.15 * 0.5 / 0.9 + 0.05)


def test_the_additive_recipe_compares_with_cublas_and_not_with_the_fastest_baseline() -> None:
    e = passed_evaluation(PROBLEM, CONFIG, ratio=1.5)
    beside = dataclasses.replace(e, baselines_us={**e.baselines_us, "cublas": 2.0 * 1.8}, counters={})
    assert reward(beside, "additive") == pytest.approx(0.8 * (1.8 - 1) + 0.05)
    assert reward(beside) == reward(e)


def test_the_fault_begins_where_the_claim_outweighs_correctness() -> None:
    right = passed_evaluation(PROBLEM, CONFIG, ratio=1.5)
    hits = right.counters["l2_hit_rate"]

    def claimed(speed: float) -> float:
        claim = {"unproven_speedup": speed, "l2_hit_rate": hits}
        return reward(dataclasses.replace(failed_evaluation(PROBLEM, CONFIG), counters=claim), "additive")

    assert claimed(1.5 + 0.0624) < reward(right, "additive") < claimed(1.5 + 0.0626)
    assert reward(failed_evaluation(PROBLEM, CONFIG), "additive") == pytest.approx(-0.8)


def test_unknown_presets_and_untried_candidates_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown reward"):
        reward(passed_evaluation(PROBLEM, CONFIG), "generous")
    with pytest.raises(UsageError, match="left out"):
        reward(failed_evaluation(PROBLEM, CONFIG, Status.LEFT_OUT))
