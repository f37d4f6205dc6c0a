"""Rewards of a training: parts add up, failures stay below what is proven, groups are normalised with guards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

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


def test_an_answer_is_compared_with_the_others_of_its_group_alone() -> None:
    found = advantages([0.0, 1.0, 3.0, 10.0, 30.0, 40.0], 3, clip=99.0)
    assert found[:3] == pytest.approx([-2 / math.sqrt(2), -0.5 / math.sqrt(4.5), 2.5 / math.sqrt(0.5)])
    assert found[3] == pytest.approx(-25 / math.sqrt(50))
    louder = advantages([0.0, 1.0, 99.0], 3, clip=1e9)
    assert louder[2] == pytest.approx(98.5 / math.sqrt(0.5)), "its own reward is not in its scale"
    assert advantages([0.0, 0.5], 2, least_std=0.5, clip=9.0) == [-1.0, 1.0]


def test_the_baseline_leaves_the_gradient_unbiased() -> None:
    """The mean of advantage x score over all groups is the gradient; a baseline with the answer in it shrinks it."""
    p, reward = 0.3, (0.0, 1.0)
    groups = list(itertools.product((0, 1), repeat=3))
    chance = {group: math.prod(p if one else 1 - p for one in group) for group in groups}

    def estimate(baseline: Callable[[Sequence[float]], Sequence[float | None]]) -> float:
        found = 0.0
        for group in groups:
            scores = [(one - p) / (p * (1 - p)) for one in group]  # derivative of the log of the chance, by p
            rewards = [reward[one] for one in group]
            pairs = zip(baseline(rewards), scores, strict=True)
            found += chance[group] * math.fsum((a or 0.0) * s for a, s in pairs) / len(group)
        return found

    # A large least_std scales all answers alike, so the gradient of the mean reward (1) can be read off.
    assert estimate(lambda r: [99 * (a or 0.0) for a in advantages(r, 3, least_std=99.0)]) == pytest.approx(1.0)
    assert estimate(lambda r: [one - sum(r) / 3 for one in r]) == pytest.approx(2 / 3)


def test_equal_rewards_give_no_advantage_and_small_noise_a_small_one() -> None:
    assert advantages([-1.0] * 4, 4) == [0.0] * 4
    noisy = advantages([0.100, 0.101, 0.099, 0.100], 4, least_std=0.05)
    assert all(a is not None and abs(a) < 0.05 for a in noisy)


def test_trl_learns_from_these_advantages_without_the_mean_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
    from outblas_lab.llm.train.step_prompts import step_trainer

    class Stub:
        state = SimpleNamespace(global_step=3)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return {"seen": inputs, "advantages": torch.tensor([1.5, -0.5, -1.0])}

    monkeypatch.setattr(trl, "GRPOTrainer", Stub)
    prompts: Any = SimpleNamespace(renewed=lambda rows, step: [*rows, step])
    made = step_trainer(prompts, lambda: [2.0, 0.0, -0.5])()._generate_and_score_completions(["row"])
    assert made["seen"] == ["row", 3] and made["advantages"].tolist() == [2.0, 0.0, -0.5]


def test_one_outlier_is_clipped() -> None:
    found = advantages([0.0] * 15 + [1.0], 16, clip=2.0)
    assert found[-1] == 2.0


def test_what_nobody_judged_counts_in_no_mean() -> None:
    found = advantages([1.0, None, 3.0, None, 5.0], 5, clip=9.0)
    assert found[1] is None and found[3] is None
    assert [found[i] for i in (0, 2, 4)] == pytest.approx([-3 / math.sqrt(2), 0.0, 3 / math.sqrt(2)])
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
