"""The floor of a problem and its regime, against the definition worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.gpu_records import packaged_gpu, packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import (
    MAX_REPEATS,
    ROTATE_BYTES,
    floor_us,
    operand_sets,
    regime,
    repeats,
    work_us,
)
from outblas.core.suites import suite

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from support.gpus.known import H200  # noqa: E402

shapes = st.builds(Problem, *(st.integers(1, 16384) for _ in range(3)))


def test_compute_bound_floor_is_flops_over_the_peak() -> None:
    assert floor_us(Problem(4096, 4096, 4096), H200) == pytest.approx(2 * 4096**3 / 800e12 * 1e6)


def test_memory_bound_floor_is_bytes_over_hbm_bandwidth_when_the_sets_exceed_l2() -> None:
    problem = Problem(64, 16384, 16384)  # B alone is 537 MB
    assert floor_us(problem, H200) == pytest.approx(problem.bytes / 4.2e12 * 1e6)


def test_small_problems_are_bound_by_the_launch() -> None:
    assert floor_us(Problem(64, 64, 64), H200) == H200.launch_us
    assert regime(Problem(64, 64, 64), H200) == "launch"
    assert work_us(Problem(64, 64, 64), H200) < H200.launch_us


def test_what_fits_in_l2_with_all_its_sets_moves_at_l2_bandwidth() -> None:
    problem = Problem(64, 64, 1024)  # 0.27 MB a set, 32 sets
    assert problem.bytes * operand_sets(problem, 1.0) < H200.l2_bytes
    assert work_us(problem, H200) == pytest.approx(problem.bytes / 6e12 * 1e6)


@given(shapes)
def test_the_floor_is_never_below_any_of_its_three_limits(problem: Problem) -> None:
    floor = floor_us(problem, H200)
    assert floor >= H200.launch_us
    assert floor >= problem.flops / (H200.tflops * 1e6)
    assert floor >= problem.bytes / (H200.l2_tbs * 1e6)
    assert floor == max(H200.launch_us, work_us(problem, H200))


@given(shapes)
def test_a_slower_gpu_has_no_lower_floor(problem: Problem) -> None:
    slower = replace(H200, tflops=H200.tflops / 2, hbm_tbs=H200.hbm_tbs / 2, l2_tbs=H200.l2_tbs / 2)
    assert floor_us(problem, slower) >= floor_us(problem, H200)


@given(shapes)
def test_a_regime_is_launch_or_a_limit_with_the_decade_of_flop(problem: Problem) -> None:
    name = regime(problem, H200)
    if name != "launch":
        kind, _, decade = name.partition("_1e")
        assert kind in ("memory", "compute")
        assert 10 ** int(decade) <= problem.flops < 10 ** (int(decade) + 1)


def test_regimes_split_the_grid_and_none_is_empty() -> None:
    kinds = {regime(p, H200).partition("_")[0] for p in suite("grid1000")}
    assert kinds == {"launch", "memory", "compute"}


@given(st.floats(1e-6, 1e9))
def test_repeats_are_at_least_one_and_at_most_the_limit(us: float) -> None:
    assert 1 <= repeats(us) <= MAX_REPEATS


def test_repeats_make_about_300_us_of_work() -> None:
    assert (repeats(1.0), repeats(30.0), repeats(299.0), repeats(5000.0)) == (MAX_REPEATS, 10, 1, 1)


@given(shapes, st.floats(0.5, 1e5))
def test_operand_sets_rotate_over_200_mb_unless_the_calls_run_out(problem: Problem, us: float) -> None:
    sets = operand_sets(problem, us)
    assert 1 <= sets <= repeats(us)
    assert sets == repeats(us) or sets * problem.bytes >= ROTATE_BYTES
    assert sets == 1 or (sets - 1) * problem.bytes < ROTATE_BYTES  # and not over more than needed


@pytest.mark.parametrize(("size", "most"), [(1, 132), (2, 66), (3, 39), (4, 30), (6, 17), (8, 15), (12, 7), (16, 7)])
def test_resident_clusters_of_an_h200_are_what_the_driver_answers(size: int, most: int) -> None:
    """cuOccupancyMaxActiveClusters with one CTA per SM: a cluster stays in one GPC, and GPCs are uneven."""
    assert H200.most_clusters(size) == most


@pytest.mark.parametrize("size", [0, -1])
def test_a_cluster_has_a_cta(size: int) -> None:
    with pytest.raises(UsageError, match=f"cluster size is {size} CTAs; expected 1 or more CTAs"):
        H200.most_clusters(size)


def test_larger_clusters_are_never_more() -> None:
    most = [H200.most_clusters(size) for size in range(1, 17)]
    assert most == sorted(most, reverse=True) and len(H200.clusters) == 16
    assert all(1 <= n * size <= H200.sms for size, n in enumerate(most, start=1))


def test_where_the_driver_was_not_asked_the_sms_are_shared_out() -> None:
    unknown = replace(H200, sms=78, clusters=())
    assert [unknown.most_clusters(size) for size in (1, 2, 5, 16)] == [78, 39, 15, 4]
    assert replace(unknown, sms=10).most_clusters(16) == 1, "something always runs"
    assert replace(H200, clusters=(132, 66)).most_clusters(4) == 33, "beyond what was asked"


@pytest.mark.parametrize("name", packaged_records())
def test_a_gpu_is_registered_under_its_own_name(name: Any) -> None:
    assert packaged_gpu(name).name == name
