"""The state machine of learning on a fake machine: who computes a call, and proofs, rounds, rows and costs."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outblas.adapt.learning import learner as learner_module
from outblas.adapt.learning.gpu_workbench import ALL_INPUTS
from outblas.adapt.learning.learn_product import BRIEF, MAX_SPOILED, SCREENING_ROUNDS
from outblas.adapt.learning.learned_products import Stage
from outblas.adapt.learning.learner import CALLS_BEFORE_QUEUED
from outblas.adapt.learning.slice_limits import HOST_SHARE, RUNNING, SEARCH_SHARE, SETTLING, SHARE, pause_after
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.problem import Problem
from outblas.dispatch.decide import NotWhileCapturing
from outblas.records.library_row import LibraryRow
from support.gpus.known import H200
from support.learning.fake_machine import ALGORITHM, DEPENDENT, FAST, OTHER, OWN, PROBLEM, SLOW
from support.learning.lone_learner import LoneLearner


def test_torch_computes_until_a_winner_is_proven_timed_and_saved(alone: LoneLearner) -> None:
    machine = alone.machine
    for _ in range(CALLS_BEFORE_QUEUED - 1):
        assert alone.call() == ("too few calls so far to learn it", True)
    assert not alone.learner.report().products and alone.learner.advance() is None
    assert alone.call() is OWN and alone.one().stage is Stage.QUEUED, "from now on as without learning"
    seen = set()
    while alone.learner.advance() is not None:
        seen.add(alone.one().stage)
        assert alone.one().row is not None or alone.call() is OWN
    assert seen == {Stage.QUEUED, Stage.PROVING, Stage.TIMING, Stage.SETTLED}
    row = alone.call()
    assert row.plain.config == row.pdl.config == FAST.config and row.baseline == "torch" and row.source == "cuda:0"
    assert row.plain.speedup == pytest.approx(1.25) and row.plain.low == pytest.approx(1.25)
    assert machine.saved == [row] and machine.forgotten == 1 and machine.benches[0].closed
    assert machine.proofs == [(one, inputs) for inputs in ALL_INPUTS for one in (FAST, SLOW)]
    ordering = [FAST, SLOW] * SCREENING_ROUNDS + [FAST] * (BRIEF.ordering - SCREENING_ROUNDS)
    assert machine.rounds == ordering + [FAST] * BRIEF.looks[0], "the slow one is not timed anew"
    assert "1.250 times torch" in alone.one().detail and "saved" in str(alone.learner.report())


def test_what_is_wrong_is_neither_timed_nor_proven_further(alone: LoneLearner) -> None:
    alone.machine.wrong = {(FAST, "integers"): "3 elements differ", (ALGORITHM, "normal"): "error 2 times the bound"}
    alone.machine.us = {FAST: 1.0, ALGORITHM: 1.0, SLOW: 9.0}
    alone.queue()
    alone.work()
    assert set(alone.machine.rounds) == {SLOW} and (FAST, "normal") not in alone.machine.proofs
    assert alone.call().plain.config == SLOW.config
    assert alone.one().refused == {
        FAST.name: "integers: 3 elements differ",
        ALGORITHM.name: "normal: error 2 times the bound",
    }


def noisy(*us: float) -> Callable[[], float]:
    return itertools.cycle(us).__next__


@pytest.mark.parametrize(
    ("us", "last_look"),
    [(9.98, BRIEF.looks[0]), (noisy(8.0, 11.0), BRIEF.looks[-1]), (noisy(9.95, 9.85), BRIEF.looks[-1])],
)
def test_an_unsure_result_keeps_what_ran_before_and_saves_nothing(alone: LoneLearner, us: Any, last_look: int) -> None:
    alone.machine.us = {FAST: us}
    alone.queue()
    alone.work()
    assert len(alone.machine.rounds) == BRIEF.ordering + last_look
    assert alone.call() is OWN and not alone.machine.saved and not alone.machine.forgotten
    assert alone.one().stage is Stage.SETTLED and "surely faster than torch, the nearest is sm90" in alone.one().detail


def test_without_a_choice_before_torch_goes_on(alone: LoneLearner) -> None:
    alone.machine.us, alone.machine.unmeasured = {SLOW: 12.0}, None
    alone.queue()
    alone.work()
    row = alone.call()
    assert (row.plain, row.pdl, row.fallback, row.baseline) == (None, None, "", "torch")
    assert not alone.machine.saved and not alone.machine.forgotten, "torch ran before, so every cache is right"


@pytest.mark.parametrize(("us", "wrong"), [(12.0, {}), (5.0, {(FAST, "normal"): "error 2 times the bound"})])
def test_a_choice_that_is_slower_or_wrong_gives_way_to_torch(alone: LoneLearner, us: float, wrong: Any) -> None:
    alone.machine.us, alone.machine.wrong, alone.machine.unmeasured = {FAST: us}, wrong, FAST
    alone.queue()
    alone.work()
    assert alone.call().plain is None and alone.machine.forgotten == 1 and not alone.machine.saved


def test_a_choice_that_may_be_faster_stays(alone: LoneLearner) -> None:
    alone.machine.us, alone.machine.unmeasured = {FAST: 9.95}, FAST
    alone.queue()
    alone.work()
    assert alone.call() is OWN and f"{FAST.name} stays" in alone.one().detail and not alone.machine.forgotten


def test_what_is_far_slower_than_the_best_is_not_timed_further(alone: LoneLearner) -> None:
    alone.machine.us = {FAST: 8.0, ALGORITHM: 8.2, SLOW: 9.5}
    alone.queue()
    alone.work()
    count = {contender: alone.machine.rounds.count(contender) for contender in (FAST, ALGORITHM, SLOW)}
    assert count == {
        FAST: BRIEF.ordering + BRIEF.looks[0],
        ALGORITHM: BRIEF.ordering + BRIEF.looks[0],
        SLOW: SCREENING_ROUNDS,
    }
    assert alone.call().plain.config == FAST.config


def test_what_is_slower_than_torch_costs_no_further_rounds(alone: LoneLearner) -> None:
    alone.machine.us = {FAST: 10.5, SLOW: 11.0}
    alone.queue()
    alone.work()
    assert len(alone.machine.rounds) == 2 * BRIEF.ordering


def test_an_algorithm_of_cublaslt_may_win(alone: LoneLearner) -> None:
    alone.machine.us = {FAST: 9.0, ALGORITHM: 8.0}
    alone.queue()
    alone.work()
    assert alone.call().fallback == ALGORITHM.algorithm and alone.call().plain is None


def test_a_launch_option_is_learned_for_itself(alone: LoneLearner) -> None:
    alone.machine.us = {DEPENDENT: 5.0, FAST: 8.0}
    alone.queue(launch="weights")
    alone.work()
    row = alone.call(launch="pdl")
    assert row.plain is None and row.pdl.config == DEPENDENT.config
    assert alone.call(launch="plain")[1] is True
    alone.machine.us = {FAST: 8.0}
    alone.queue(OTHER, "pdl")
    alone.work()
    assert alone.call(OTHER, "pdl").plain.config == alone.call(OTHER, "pdl").pdl.config == FAST.config


def test_a_capture_neither_counts_nor_queues_and_sees_settled_rows(alone: LoneLearner) -> None:
    alone.capturing = True
    for _ in range(5):
        with pytest.raises(NotWhileCapturing):
            alone.learner.row_for(0, None, PROBLEM, H200, "plain")
    assert not alone.learner.report().products and alone.learner.advance() is None
    alone.capturing = False
    alone.queue()
    alone.work()
    alone.capturing = True
    assert alone.call().plain.config == FAST.config


def test_the_budget_ends_the_job_and_gives_the_queue_back(alone: LoneLearner) -> None:
    alone.learner.budget.seconds = 0.0005
    alone.queue()
    alone.queue(OTHER)
    assert alone.work() == 2 + 5, "two of the host, then five slices of 100 us"
    assert alone.learner.budget.used == pytest.approx(0.0005)
    assert {one.stage for one in alone.learner.report().products} == {Stage.LEFT_ALONE}
    assert alone.machine.benches[0].closed and not alone.machine.forgotten
    assert alone.call() is OWN and alone.call(OTHER, own=None) is None
    alone.queue(Problem(19, 64, 64))
    assert len(alone.learner.report().products) == 2, "nothing new without a budget"


def test_one_product_cannot_take_the_whole_budget(alone: LoneLearner) -> None:
    alone.machine.slice_us = 1e5
    alone.queue()
    assert alone.work() == 2 + 3 and alone.one().gpu_seconds == pytest.approx(0.3)
    assert alone.one().stage is Stage.LEFT_ALONE
    assert alone.one().detail == "it used more than 0.3 GPU seconds, 0.30 of them for proofs"


def test_what_no_memory_holds_goes_its_own_way_without_a_trace(alone: LoneLearner) -> None:
    alone.machine.reason = lambda problem: "too large"
    assert [alone.call() for _ in range(5)] == [OWN] * 5
    assert not alone.learner._seen and not alone.learner.report().products


def test_random_shapes_leave_memory_level(alone: LoneLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "MAX_SEEN", 50)
    monkeypatch.setattr(learner_module, "MAX_PRODUCTS", 20)
    for m in range(1, 500):
        alone.call(Problem(m, 64, 64))
    assert len(alone.learner._seen) == 50 and not alone.learner._products
    for m in range(1, 100):
        alone.queue(Problem(m, 64, 64))
    assert len(alone.learner._products) == 20
    assert alone.call(Problem(99, 64, 64)) is OWN


@pytest.mark.parametrize(
    "error", [DeviceError("no memory", "some", "free it"), RuntimeError("CUDA error"), KeyError(1)]
)
def test_an_error_leaves_one_product_alone_and_no_other(alone: LoneLearner, error: Exception) -> None:
    alone.machine.fails = error
    alone.queue()
    alone.queue(OTHER)
    alone.work()
    first, second = alone.learner.report().products
    assert (first.stage, second.stage) == (Stage.LEFT_ALONE, Stage.SETTLED)
    assert type(error).__name__ in first.detail and alone.call() is OWN


def test_a_winner_that_cannot_be_saved_holds_in_this_process(
    alone: LoneLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(row: LibraryRow) -> str:
        raise RecordError("the disk is full", "room", "free some")

    monkeypatch.setattr(alone.machine, "save", refuse)
    alone.queue()
    alone.work()
    assert alone.call().plain.config == FAST.config and "not saved: the disk is full" in alone.one().detail


def test_without_contenders_the_product_goes_its_own_way(alone: LoneLearner) -> None:
    alone.machine.us = {}
    alone.queue()
    alone.work()
    assert alone.one().stage is Stage.LEFT_ALONE and "outblas tune" in alone.one().detail and alone.call() is OWN


def test_rounds_that_the_host_spoils_are_repeated_and_given_up_in_the_end(alone: LoneLearner) -> None:
    late = iter([None, None] + [8.0] * 100)
    alone.machine.us = {FAST: late.__next__}
    alone.queue()
    alone.work()
    assert alone.call().plain.config == FAST.config
    assert len(alone.machine.rounds) == 2 + BRIEF.ordering + BRIEF.looks[0]
    alone.machine.us, before = {FAST: lambda: None}, len(alone.machine.rounds)
    alone.queue(OTHER)
    alone.work()
    assert len(alone.machine.rounds) - before == MAX_SPOILED
    assert alone.learner.report().products[1].stage is Stage.LEFT_ALONE


def test_times_beside_changed_operands_count_for_nothing(alone: LoneLearner) -> None:
    alone.machine.intact = False
    alone.queue()
    alone.work()
    assert alone.call() is OWN and not alone.machine.saved


def test_pauses_keep_the_share_and_settling_has_none(alone: LoneLearner) -> None:
    assert pause_after(200.0) == pytest.approx(200e-6 * (1 / SHARE - 1))
    assert pause_after(0.0) == 0.001 and pause_after(1e9) == 1.0
    assert pause_after(10.0, 2000.0) == pytest.approx(2e-3 * (1 / HOST_SHARE - 1))
    alone.ticks = itertools.count(0.0, 0.002)
    alone.queue()
    assert alone.learner.advance() == pytest.approx(pause_after(0.0, 2000.0, SEARCH_SHARE)), "the host finds contenders"
    assert not alone.learner.budget.used
    alone.ticks = itertools.repeat(0.0)
    alone.learner.advance()
    assert alone.learner.advance() == pytest.approx(pause_after(100.0))
    alone.learner._limits = SETTLING
    assert alone.learner.advance() == 0.0


@pytest.mark.parametrize("fails", [None, RuntimeError("no memory")])
def test_warming_up_runs_on_the_thread_and_is_waited_for(threaded: LoneLearner, fails: Exception | None) -> None:
    threaded.machine.fails = fails
    threaded.learner.warm_up(0, H200)
    assert not threaded.machine.warmed, "its library was given by the program"
    threaded.learner.chooser(0, None)
    threaded.learner.warm_up(0, H200)
    assert threaded.machine.warmed == 1 and not threaded.learner._to_warm
    threaded.queue()
    threaded.learner.settle()
    assert threaded.one().stage is Stage.SETTLED


def test_a_forked_child_ends_even_if_the_lock_was_held(alone: LoneLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit handler must not wait for a thread that only the parent has."""
    pid = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: pid + 1)
    exits = threading.Thread(target=alone.learner.stop, daemon=True)
    with alone.learner._lock:
        exits.start()
        exits.join(5)
        assert not exits.is_alive()


def test_a_forked_child_learns_nothing(alone: LoneLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert alone.call() is OWN and not alone.learner._seen


@pytest.mark.parametrize("graphs", [False, True])
def test_settle_learns_what_was_seen_once_and_what_no_slice_holds(threaded: LoneLearner, graphs: bool) -> None:
    threaded.machine.fits = lambda problem: problem != OTHER
    threaded.call()
    threaded.queue(OTHER)
    assert threaded.call(OTHER) is OWN, "it runs as without learning until then"
    report = threaded.learner.settle(graphs=graphs)
    assert [one.stage for one in report.products] == [Stage.SETTLED] * 2
    assert {one.problem for one in report.products} == {PROBLEM, OTHER}
    assert [limits.graphs for limits in threaded.machine.limits] == [graphs] * 2
    assert RUNNING not in threaded.machine.limits and len(threaded.machine.saved) == 2
    assert threaded.call(OTHER).plain.config == FAST.config


def test_what_an_interrupted_settle_was_at_does_not_go_on_beside_the_program(alone: LoneLearner) -> None:
    alone.queue()
    alone.learner._limits = SETTLING
    for _ in range(4):
        alone.learner.advance()
    assert alone.one().stage in (Stage.PROVING, Stage.TIMING)
    alone.learner._limits = RUNNING
    alone.learner.advance()
    assert (alone.one().stage, alone.one().detail) == (Stage.LEFT_ALONE, "settle() was interrupted")
    assert alone.machine.benches[0].closed and alone.learner._job is None
    with alone.learner._lock:
        alone.learner._queue_all()
    alone.work()
    assert alone.one().stage is Stage.SETTLED and alone.machine.limits == [SETTLING, RUNNING]


def test_a_large_product_of_an_interrupted_settle_waits_again(alone: LoneLearner) -> None:
    alone.machine.fits = lambda problem: False
    alone.queue()
    with alone.learner._lock:
        alone.learner._queue_all()
    assert alone.one().stage is Stage.QUEUED and alone.learner.advance() is None
    assert alone.one().stage is Stage.WAITING


def test_settle_may_have_a_budget_of_its_own(threaded: LoneLearner) -> None:
    threaded.learner.budget.seconds = 0.0
    threaded.learner.budget.allow(0.0)
    assert threaded.call() is OWN
    threaded.learner.budget.seconds = 1e-4
    threaded.queue()
    assert [one.stage for one in threaded.learner.settle().products] == [Stage.LEFT_ALONE]
    assert [one.stage for one in threaded.learner.settle(1.0).products] == [Stage.SETTLED]
    with pytest.raises(UsageError, match="learn_seconds is"):
        threaded.learner.settle(-1.0)


def test_settle_is_refused_while_a_graph_is_captured(alone: LoneLearner) -> None:
    alone.capturing = True
    with pytest.raises(UsageError, match="CUDA graph capture"):
        alone.learner.settle()


def test_no_call_waits_while_a_slice_runs(threaded: LoneLearner) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def gate() -> None:
        inside.set()
        assert go_on.wait(20)

    threaded.machine.gate = gate
    threaded.queue()
    assert inside.wait(20)
    assert threaded.call() is OWN and threaded.call(OTHER)[1] is True
    threaded.queue(OTHER)
    assert len(threaded.learner.report().products) == 2
    threaded.machine.gate = None
    go_on.set()
    assert {one.stage for one in threaded.learner.settle().products} == {Stage.SETTLED}


def test_calls_of_many_threads_make_one_record(threaded: LoneLearner) -> None:
    start = threading.Barrier(8)

    def call() -> None:
        start.wait()
        for _ in range(50):
            threaded.call()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded.learner.settle()
    assert len(threaded.learner.report().products) == 1 and len(threaded.machine.saved) == 1


def test_a_stopped_learner_ends_its_thread_and_closes_its_bench(threaded: LoneLearner) -> None:
    timing = threading.Event()
    threaded.machine.us = {FAST: lambda: timing.set() or 8.0}
    threaded.learner.budget.seconds = float("inf")
    threaded.queue()
    assert timing.wait(20)
    threaded.learner.stop()
    assert not threaded.learner._is_alive() and threaded.machine.benches[0].closed
    assert threaded.one().stage in (Stage.LEFT_ALONE, Stage.SETTLED)
    assert threaded.call(OTHER) is OWN, "nothing new is learned"
