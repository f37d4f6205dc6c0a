"""Rewards of a training: parts add up, failures stay below what is proven, groups are normalised with guards."""

from __future__ import annotations

import itertools
import math

import pytest

from outblas.core.evaluation import FAILURES, Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.jail.plausibility import least_us
from outblas_lab.llm.train.rewards import (
    PART_NAMES,
    UNPROVEN_REWARD,
    RefusedAnswer,
    advantages,
    reward_parts,
    speed_reward,
)
from outblas_lab.llm.train.training_folder import line_of, row_of
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)
CONFIG = Sm90WgmmaConfig(64, 64)


def passed(low: float | None = 1.0, us: float = 5.0) -> Evaluation:
    timing = Timing("offline", (us,) * 3, us, 0.01)
    found = None if low is None else Speedup("torch", low, low, low)
    return Evaluation(PROBLEM, CONFIG, Status.PASSED, timing=timing, speedup=found)


def failed(status: Status) -> Evaluation:
    return Evaluation(PROBLEM, CONFIG, status, "as ordered")


def test_parts_add_up_to_the_total() -> None:
    for answer in (RefusedAnswer("x"), failed(Status.WRONG), passed(1.3)):
        found = reward_parts(answer, timed=True, gpu=H200)
        assert found.total == pytest.approx(sum(getattr(found, name) for name in PART_NAMES))


def test_the_further_an_answer_came_the_more_it_gets_and_nothing_that_failed_reaches_what_is_proven() -> None:
    ladder = [reward_parts(RefusedAnswer("no code"), timed=True, gpu=H200).total]
    ladder += [reward_parts(failed(status), timed=True, gpu=H200).total for status in FAILURES]
    ladder.append(reward_parts(failed(Status.LEFT_OUT), timed=True, gpu=H200).total)
    ladder.append(reward_parts(passed(1e-9), timed=True, gpu=H200).total)
    ladder.append(reward_parts(passed(1.0), timed=True, gpu=H200).total)
    ladder.append(reward_parts(passed(2.0), timed=True, gpu=H200).total)
    assert ladder == sorted(ladder) and len(set(ladder)) == len(ladder)


def test_no_kernel_that_failed_is_paid_as_much_as_any_that_was_proven() -> None:
    """Over all statuses, with whatever times and speed-ups an evaluation can carry."""
    lows = (None, -1.0, 0.0, 1e-300, 0.9, 1.0, 1e300, math.inf, math.nan)
    times = (None, 0.0, least_us(PROBLEM, H200) * 0.96, least_us(PROBLEM, H200) * 0.975, 5.0, 1e9, math.nan)
    for timed in (False, True):
        right, wrong = [], [reward_parts(RefusedAnswer("x"), timed, H200).total]
        for status, low, us in itertools.product(Status, lows, times):
            if (us is None) is (status is Status.PASSED) or (us is None and low is not None):
                continue  # an evaluation of a failure that has figures, or of a proven kernel that has none, is refused
            timing = None if us is None else Timing("offline", (us,), us, 0.0)
            ratio = None if low is None else Speedup("torch", low, low, low)
            total = reward_parts(Evaluation(PROBLEM, CONFIG, status, timing=timing, speedup=ratio), timed, H200).total
            assert math.isfinite(total)
            plausible = us is None or us >= 0.97 * least_us(PROBLEM, H200)
            (right if status is Status.PASSED and plausible else wrong).append(total)
        assert max(wrong) < min(right)


def test_each_missed_step_is_a_part_of_its_own() -> None:
    refused, broken, spilled, wrong = (
        reward_parts(a, timed=False, gpu=H200)
        for a in (
            RefusedAnswer("x"),
            failed(Status.COMPILE_ERROR),
            failed(Status.STATIC_REJECTED),
            failed(Status.WRONG),
        )
    )
    assert refused.format < 0 and refused.compiled < 0 and refused.static < 0
    assert broken.format == 0 and broken.compiled < 0 and broken.static < 0
    assert spilled.compiled == 0 and spilled.static < 0
    assert wrong.compiled == wrong.static == 0 and wrong.correct < -1
    assert all(p.speed == 0 for p in (refused, broken, spilled, wrong))


def test_compiled_but_not_run_is_never_paid_as_proven() -> None:
    found = reward_parts(failed(Status.LEFT_OUT), timed=True, gpu=H200)
    assert found.correct == UNPROVEN_REWARD < 0
    assert found.total < reward_parts(passed(math.exp(-10)), timed=True, gpu=H200).total


def test_without_timing_every_proven_kernel_is_worth_the_same() -> None:
    assert reward_parts(passed(0.2), timed=False, gpu=H200) == reward_parts(passed(3.0), timed=False, gpu=H200)


def test_speed_is_the_smoothed_log_of_the_lower_bound() -> None:
    assert speed_reward(passed(1.0)) == 0.0
    assert speed_reward(passed(1.01)) == pytest.approx(math.log(1.01), rel=1e-3)
    assert speed_reward(passed(2.0)) == pytest.approx(-speed_reward(passed(0.5)))
    assert -1 < speed_reward(passed(1e-30)) < speed_reward(passed(0.1))
    assert speed_reward(passed(1e30)) < 1
    assert speed_reward(passed(None)) == 0.0


def test_luck_is_not_paid() -> None:
    lucky = Evaluation(
        PROBLEM,
        CONFIG,
        Status.PASSED,
        timing=Timing("offline", (5.0,), 5.0, 0.0),
        speedup=Speedup("torch", 2.0, 0.9, 4.0),
    )
    assert reward_parts(lucky, timed=True, gpu=H200).total < 0


def test_faster_than_the_floor_is_a_broken_rule_whatever_it_claims() -> None:
    floor = least_us(PROBLEM, H200)
    cheat, honest = passed(50.0, floor * 0.9), passed(1.5, floor * 0.975)
    assert reward_parts(cheat, timed=True, gpu=H200) == reward_parts(failed(Status.RULE_BROKEN), timed=True, gpu=H200)
    assert reward_parts(cheat, timed=False, gpu=H200).total < -1
    assert reward_parts(honest, timed=True, gpu=H200).total > 0


def test_advantages_are_normalised_within_each_group() -> None:
    found = advantages([0.0, 1.0, 10.0, 30.0], 2, clip=9.0)
    assert found == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2)


def test_equal_rewards_give_no_advantage_and_small_noise_a_small_one() -> None:
    assert advantages([-1.0] * 4, 4) == [0.0] * 4
    noisy = advantages([0.100, 0.101, 0.099, 0.100], 4, least_std=0.05)
    assert all(a is not None and abs(a) < 0.05 for a in noisy)


def test_one_outlier_is_clipped() -> None:
    found = advantages([0.0] * 15 + [1.0], 16, clip=2.0)
    assert found[-1] == 2.0


def test_what_nobody_judged_counts_in_no_mean() -> None:
    found = advantages([1.0, None, 3.0, None], 4, clip=9.0)
    assert found[1] is None and found[3] is None
    assert found[0] == pytest.approx(-math.sqrt(0.5)) and found[2] == pytest.approx(math.sqrt(0.5))
    assert advantages([None, None], 2) == [None, None]
    assert advantages([None, 5.0], 2) == [None, 0.0]


@pytest.mark.parametrize(("count", "group"), [(3, 2), (4, 1), (2, 4)])
def test_only_whole_groups(count: int, group: int) -> None:
    with pytest.raises(ValueError, match="complete groups"):
        advantages([0.0] * count, group)


def test_a_step_is_one_line_whatever_was_logged() -> None:
    total = row_of(3, {"rewards/total/mean": -1.234, "rewards/total/std": 0.5, "loss": 0.5})
    assert line_of(total, 100, 1.2) == "step 3/100, reward -1.23 \u00b1 0.5, loss 0.5, best 1.200x"
    part = row_of(3, {"rewards/total/mean": 1.0, f"rewards/{PART_NAMES[0]}/mean": 0.25})
    assert line_of(part, 100, None) == f"step 3/100, reward 1 \u00b1 -, {PART_NAMES[0]} 0.25"
