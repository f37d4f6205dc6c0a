"""The one rule of which times are believed, and that everybody keeps it."""

from __future__ import annotations

import math

import pytest

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.plausibility import PLAUSIBLE_SHARE_OF_FLOOR, is_below_floor, why_too_fast
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.llm.feedback import feedback_text, kind_of
from outblas.llm.train.rewards import reward_parts
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)
FLOOR = floor_us(PROBLEM, H200)


def timed(us: float, baseline_us: float = 5.0) -> Evaluation:
    ratio = baseline_us / us
    return Evaluation(
        PROBLEM, Sm90WgmmaConfig(64, 64), Status.PASSED, timing=Timing("offline", (us,) * 3, us, 0.0),
        baselines_us={"cublas": baseline_us}, speedup=Speedup("cublas", ratio, ratio, ratio),
    )  # fmt: skip


def test_a_time_below_the_floor_is_not_believed_unless_by_little() -> None:
    assert why_too_fast(2.0, {"cublas": 3.0}, 1.9) == ""
    assert why_too_fast(1.95, {"cublas": 3.0}, 2.0) == ""
    assert "faster than the floor" in why_too_fast(1.5, {"cublas": 3.0}, 2.0)
    assert why_too_fast(1.5, {"cublas": 1.5}, 2.0) == "", "the floor is wrong by as much as a baseline shows"
    assert why_too_fast(math.nan, {}, 2.0)


def test_what_was_measured_below_the_floor_is_within_the_margin() -> None:
    assert PLAUSIBLE_SHARE_OF_FLOOR <= 1 - 0.025, "proven kernels were measured 2.5% below their floors"


@pytest.mark.parametrize(
    ("us", "baseline_us", "cheats"),
    [(0.94 * FLOOR, 5.0, True), (0.96 * FLOOR, 5.0, False), (0.9 * FLOOR, 0.94 * FLOOR, False)],
)
def test_archive_and_rewards_believe_the_same(us: float, baseline_us: float, cheats: bool) -> None:
    found = timed(us, baseline_us)
    assert is_below_floor(found, H200) is cheats
    assert (kind_of(found, H200) == "cheat") is cheats
    assert ("faster than the hardware" in feedback_text(found, H200)) is cheats
    assert (reward_parts(found, timed=True, gpu=H200).total < -1) is cheats


def test_what_was_not_timed_is_not_too_fast() -> None:
    assert not is_below_floor(Evaluation(PROBLEM, Sm90WgmmaConfig(64, 64), Status.WRONG), H200)


@pytest.mark.parametrize(
    ("floor", "baselines", "known"), [(2.0, {}, 2.0), (2.0, {"a": 3.0}, 2.0), (2.0, {"a": 0.5, "b": 1.0}, 0.5)]
)
def test_the_limit_is_95_percent_of_what_is_known_and_is_believed_itself(floor, baselines, known) -> None:
    limit = 0.95 * known
    assert why_too_fast(limit, baselines, floor) == ""
    below = math.nextafter(limit, 0.0)
    assert f"{limit:.3f} us, the machine needs {known:.3f} us" in why_too_fast(below, baselines, floor)
