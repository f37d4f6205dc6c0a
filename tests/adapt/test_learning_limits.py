"""The limits of learning, to the microsecond and the byte, on a GPU whose figures are round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.adapt.learning import slice_limits
from outblas.adapt.learning.slice_limits import (
    RUNNING,
    SETTLING,
    SHARED_WORKSPACE_BYTES,
    GpuBudget,
    SliceLimits,
    pause_after,
)
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from support.gpus.known import H200

P = Problem(64, 64, 64)
LIMITS = SliceLimits(100.0, 50.0, 1, 4, 1 << 40, 25.0, 4 * P.bytes)


@pytest.fixture(name="floor")
def floor_fixture(monkeypatch: pytest.MonkeyPatch):
    def give(us: float) -> None:
        monkeypatch.setattr(slice_limits, "floor_us", lambda problem, gpu: us)

    return give


@pytest.mark.parametrize(
    ("us", "calls", "holds"),
    [(1.0, 4, True), (6.25, 4, True), (6.3, 3, True), (12.5, 2, True), (12.6, 1, True), (25.0, 1, True),
     (25.1, 1, False)],
)  # fmt: skip
def test_a_round_has_as_many_calls_as_its_time_allows(floor, us, calls, holds) -> None:
    floor(us)
    assert (LIMITS.calls(P, H200), LIMITS.holds(P, H200)) == (calls, holds)
    assert LIMITS.round_us(P, H200) == pytest.approx(2 * calls * 1.5 * us)


@pytest.mark.parametrize(("us", "balanced"), [(100 / 3, True), (33.3, False), (8.4, False)])
def test_rounds_of_a_hundred_microseconds_are_balanced(floor, us, balanced) -> None:
    floor(us)
    assert LIMITS.is_balanced(P, H200) is balanced


def test_proofs_take_two_calls_and_eight_passes(floor) -> None:
    floor(10.0)
    gpu = replace(H200, hbm_tbs=2.0)
    assert LIMITS.proof_us(P, gpu) == pytest.approx(2 * (15.0 + 4 * P.bytes / 2e6))


@pytest.mark.parametrize(("arch", "rate"), [(80, 8e6), (90, 8e6), (100, 8e6), (86, 5e5), (89, 5e5), (120, 5e5)])
def test_a_step_of_a_reference_depends_on_the_fp64_rate(arch, rate) -> None:
    assert LIMITS.block_flop(replace(H200, arch=arch)) == rate * 25.0


@pytest.mark.parametrize(("nbytes", "sets"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_a_step_takes_as_many_sets_as_fit(nbytes, sets) -> None:
    assert replace(LIMITS, block_bytes=nbytes * P.bytes).sets_a_step(P) == sets
    assert replace(LIMITS, block_bytes=max(0, nbytes * P.bytes - 1)).sets_a_step(P) == max(1, min(4, nbytes - 1))


@pytest.mark.parametrize(("room", "sets"), [(-1, 0), (0, 0), (1, 1), (3, 3), (9, 7)])
def test_scratch_memory_holds_workspace_reference_and_sets(floor, monkeypatch, room, sets) -> None:
    floor(1.0)
    monkeypatch.setattr(slice_limits, "operand_sets", lambda problem, us: 7)
    fixed = SHARED_WORKSPACE_BYTES + 2 * LIMITS.block_bytes + 8 * 64 * 64
    assert replace(LIMITS, scratch_bytes=fixed + room * P.bytes).scratch_sets(P, H200) == sets
    assert replace(LIMITS, scratch_bytes=fixed + room * P.bytes - 1).scratch_sets(P, H200) == (
        7 if room == 9 else max(0, sets - 1)
    )


def test_slices_beside_a_program_and_in_settle() -> None:
    running = (
        RUNNING.work_us,
        RUNNING.plug_us,
        RUNNING.tries,
        RUNNING.most_calls,
        RUNNING.scratch_bytes,
        RUNNING.block_us,
    )
    settling = (
        SETTLING.work_us,
        SETTLING.plug_us,
        SETTLING.tries,
        SETTLING.most_calls,
        SETTLING.scratch_bytes,
        SETTLING.block_us,
    )
    assert running == (100.0, 100.0, 1, 4, 256_000_000, 25.0)
    assert settling == (600.0, 50_000.0, 10, 16, 2_000_000_000, 2000.0)
    assert not SETTLING.graphs and replace(SETTLING, graphs=True) == slice_limits.SETTLING_IN_GRAPHS


def test_a_budget_is_used_up_at_its_end() -> None:
    budget = GpuBudget(2.0)
    budget.charge(1.5e6)
    assert not budget.is_used_up and budget.used == pytest.approx(1.5)
    budget.charge(0.5e6)
    assert budget.is_used_up and GpuBudget(0).is_used_up and not GpuBudget().is_used_up
    assert GpuBudget().seconds == 10.0 and not GpuBudget(float("inf")).is_used_up


def test_a_budget_is_prolonged_and_never_shortened() -> None:
    budget = GpuBudget(2.0)
    budget.charge(1.5e6)
    budget.allow(0.25)
    assert budget.seconds == 2.0
    budget.allow(3.0)
    assert budget.seconds == pytest.approx(4.5)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="learn_seconds is"):
            budget.allow(wrong)
        with pytest.raises(UsageError, match="0 or more"):
            GpuBudget(wrong)


@pytest.mark.parametrize(
    ("gpu", "host", "seconds"),
    [
        (100.0, 0.0, 0.0099), (100.0, 521.0, 0.0099), (100.0, 1000.0, 0.019), (0.0, 0.0, 0.001), (10.0, 0.0, 0.001),
        (20.0, 0.0, 0.00198), (1e9, 0.0, 1.0), (0.0, 1e9, 1.0),
    ],
)  # fmt: skip
def test_a_pause_keeps_both_shares(gpu, host, seconds) -> None:
    assert pause_after(gpu, host) == pytest.approx(seconds)


def test_a_search_on_the_host_has_a_share_of_its_own() -> None:
    assert pause_after(0.0, 1000.0, 0.0025) == pytest.approx(0.399)
