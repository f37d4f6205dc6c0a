"""The one rule of which times are believed, and that everybody keeps it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.gpu_records import gpu_of_product
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_NAMES
from outblas.core.roofline import memory_us, work_us
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.result_rows import problem_of
from outblas.records.results import read_result
from outblas_lab.jail.plausibility import is_below_floor, least_us, why_too_fast
from outblas_lab.llm.feedback import feedback_text, kind_of
from outblas_lab.llm.train.rewards import reward_parts
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)
LEAST = least_us(PROBLEM, H200)


def timed(us: float, baseline_us: float = 5.0) -> Evaluation:
    ratio = baseline_us / us
    return Evaluation(
        PROBLEM, Sm90WgmmaConfig(64, 64), Status.PASSED, timing=Timing("offline", (us,) * 3, us, 0.0),
        baselines_us={"cublas": baseline_us}, speedup=Speedup("cublas", ratio, ratio, ratio),
    )  # fmt: skip


def test_a_time_below_the_floor_is_not_believed_unless_by_little() -> None:
    assert why_too_fast(2.0, {"cublas": 3.0}, 1.9) == ""
    assert why_too_fast(1.95, {"cublas": 3.0}, 2.0) == ""
    assert why_too_fast(1.93, {"cublas": 3.0}, 2.0)
    assert "faster than the floor" in why_too_fast(1.5, {"cublas": 3.0}, 2.0)
    assert why_too_fast(1.5, {"cublas": 1.5}, 2.0) == "", "the floor is wrong by as much as a baseline shows"
    assert why_too_fast(math.nan, {}, 2.0)


def test_a_launch_that_waits_takes_its_own_least_time_and_that_of_its_work() -> None:
    tiny, reads = Problem(64, 64, 64), Problem(1, 57344, 8192)
    assert least_us(PROBLEM, H200) == H200.launch_us + work_us(PROBLEM, H200)
    assert least_us(tiny, H200) > H200.launch_us > least_us(tiny, H200, overlaps=True) == 0.9 * H200.launch_us
    assert least_us(reads, H200, overlaps=True) == 0.93 * memory_us(reads, H200)


def test_no_published_row_is_implausible() -> None:
    """The files themselves; rows of cold caches are slower, and those of requests have another clock."""
    pytest.importorskip("pyarrow")
    seen = 0
    for path in sorted(Path(__file__).parents[2].glob("results/h[12]00/*_offline.parquet")):
        result = read_result(path)
        gpu = gpu_of_product(result.provenance["gpu"])
        assert gpu is not None
        for row in result.rows:
            rivals = {name: row[f"{name}_us"] for name in BASELINE_NAMES if row[f"{name}_us"] is not None}
            least = least_us(problem_of(row), gpu, bool(row["pdl"] or row["early"]))
            us = row["ours_us"]
            assert us is None or not why_too_fast(us, rivals, least), (path.name, problem_of(row).key, us)
            seen += 1
    assert seen > 20_000


@pytest.mark.parametrize(
    ("us", "baseline_us", "cheats"),
    [(0.96 * LEAST, 5.0, True), (0.975 * LEAST, 5.0, False), (0.9 * LEAST, 0.92 * LEAST, False)],
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
def test_the_limit_is_97_percent_of_what_is_known_and_is_believed_itself(floor, baselines, known) -> None:
    limit = 0.97 * known
    assert why_too_fast(limit, baselines, floor) == ""
    below = math.nextafter(limit, 0.0)
    assert f"{limit:.3f} us, but at least {known:.3f} us is needed" in why_too_fast(below, baselines, floor)
