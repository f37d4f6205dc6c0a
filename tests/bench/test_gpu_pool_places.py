"""The places of a pool: when a worker counts as silent, is given up, or is killed; no process is started."""

from __future__ import annotations

from typing import Any

import pytest

from outblas_lab.pool import gpu_pool
from outblas_lab.pool.gpu_pool import MAX_LOSSES_IN_A_ROW, MAX_WORKERS_PER_UNIT, PoolEvaluator
from outblas_lab.pool.transport import Event
from outblas_lab.pool.units import WorkUnit
from support.helpers import failed_evaluation, passed_evaluation, synthetic_catalogue, synthetic_problems


class Places:
    """A transport that notes what is done with its workers."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.started, self.stopped = size, [], []

    def start(self, worker: int) -> None:
        self.started.append(worker)

    def stop(self, worker: int) -> None:
        self.stopped.append(worker)

    def close(self) -> None: ...


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def pool(places: Places) -> PoolEvaluator:
    made: Any = PoolEvaluator(places, quiet_s=10.0, start_s=20.0)
    made._accounts = [[{}] for _ in range(places.size)]
    return made


def lose(pool: PoolEvaluator, times: int) -> None:
    for _ in range(times):
        pool._settle(Event(0, "lost", "it died"))


def test_a_finished_unit_forgives_all_losses_before_it(pool: PoolEvaluator, places: Places) -> None:
    lose(pool, MAX_LOSSES_IN_A_ROW - 1)
    assert places.started == [0] * (MAX_LOSSES_IN_A_ROW - 1)
    pool._settle(Event(0, "end", None))
    places.started.clear()
    lose(pool, MAX_LOSSES_IN_A_ROW - 1)
    assert places.started == [0] * (MAX_LOSSES_IN_A_ROW - 1), "the row of losses begins anew"
    lose(pool, 1)
    assert len(places.started) == MAX_LOSSES_IN_A_ROW - 1, "and is long enough now"


def test_a_place_outlives_a_unit_that_costs_all_the_workers_it_may(pool: PoolEvaluator, places: Places) -> None:
    lose(pool, MAX_WORKERS_PER_UNIT)
    assert places.started == [0] * MAX_WORKERS_PER_UNIT, "the unit is to blame, not the place"
    lose(pool, 1)
    assert len(places.started) == MAX_WORKERS_PER_UNIT


@pytest.mark.parametrize(
    ("state", "since", "late"),
    [
        ("busy", 989.0, True), ("busy", 991.0, False), ("starting", 979.0, True), ("starting", 989.0, False),
        ("idle", 0.0, False), ("gone", 0.0, False), ("stopped", 0.0, False),
    ],
)  # fmt: skip
def test_who_owes_a_word_for_too_long_is_silent(
    pool: PoolEvaluator, monkeypatch: pytest.MonkeyPatch, state: Any, since: float, late: bool
) -> None:
    monkeypatch.setattr(gpu_pool.time, "monotonic", lambda: 1000.0)
    for slot in pool._slots:
        slot.state = "idle"
    pool._slots[1].state, pool._slots[1].since = state, since
    assert pool._silent() == ([1] if late else [])


def test_a_batch_that_is_left_kills_those_at_work_alone(pool: PoolEvaluator, places: Places) -> None:
    unit = WorkUnit(synthetic_problems()[0], [])
    for slot, state in zip(pool._slots, ("idle", "busy", "starting"), strict=True):
        slot.state, slot.unit = state, unit
    pool._abandon()
    assert places.stopped == [1]
    assert [slot.state for slot in pool._slots] == ["idle", "stopped", "starting"]
    assert [slot.unit for slot in pool._slots] == [unit, None, unit]


def test_a_host_takes_a_task_and_goes_on_with_it() -> None:
    from outblas_lab.pool.transport import EvaluatorSpec
    from outblas_lab.pool.worker_host import WorkerHost

    host: Any = WorkerHost(EvaluatorSpec("support.pool_workers:Many"))
    tasks = {"one": [("answer", 1), ("end", None)], "two": [("answer", 2)]}
    host.messages = lambda task: iter(tasks[task])
    assert [host.step("one"), host.step(None), host.step("two")] == [("answer", 1), ("end", None), ("answer", 2)]


class Pipe:
    """A child process that says what it was given to say."""

    def __init__(self, worker: int, log: list[Any], *words: Any) -> None:
        self._worker, self._log, self._words = worker, log, list(words)
        self.connection = self

    def recv(self) -> Any:
        return self._words.pop(0)

    def close(self) -> None:
        self._log.append(("deaf", self._worker))

    def end(self, kill: bool) -> None:
        self._log.append(("end", self._worker, kill))


def test_local_workers_are_at_work_until_their_last_word_and_end_together() -> None:
    from outblas_lab.pool.worker_plan import LocalTransport

    log: list[Any] = []
    transport: Any = LocalTransport.__new__(LocalTransport)
    words = [("answer", 1), ("end", None), ("answer", 2)]
    transport._children = {0: Pipe(0, log, *words), 1: Pipe(1, log), 2: Pipe(2, log)}
    transport._busy = {0, 1}
    heard = [transport._heard(0) for _ in range(2)]
    assert heard == [Event(0, "answer", 1), Event(0, "end", None)]
    assert transport._busy == {1}
    transport._busy.add(0)
    assert transport._heard(0) == Event(0, "answer", 2) and transport._busy == {0, 1}, "an answer is not the last word"
    transport._busy = {1}
    transport.close()
    assert log[0] == ("end", 1, True), "who is at work is killed"
    assert sorted(log[1:3]) == [("deaf", 0), ("deaf", 2)], "nobody is waited for before all are told"
    assert sorted(log[3:]) == [("end", 0, False), ("end", 2, False)]


@pytest.mark.parametrize(("cores", "gpus", "left"), [(16, 2, 12), (16, 3, 10), (4, 4, 1), (7, 2, 3)])
def test_the_driver_leaves_each_gpu_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, left: int
) -> None:
    from outblas.runtime import nvrtc
    from outblas_lab.pool import compile_for_pool as compile_ahead
    from outblas_lab.pool import worker_plan
    from support.gpus.known import H200

    taken: list[int] = []
    monkeypatch.setattr(nvrtc, "usable_cores", lambda: cores)
    monkeypatch.setattr(compile_ahead, "CompileAhead", lambda gpu, jobs, epilogue: taken.append(jobs))
    monkeypatch.setattr(compile_ahead, "BaselineKernels", lambda gpu: None)
    plan = worker_plan.WorkerPlan("local", worker_plan.Device(gpu_index=0), tuple(range(gpus)))
    make: Any = worker_plan._compiler(plan)
    make(H200)
    assert taken == [left]


def test_only_what_passed_is_proved_for_the_other_workers(pool: PoolEvaluator) -> None:
    from outblas.core.config import kernel_kind
    from outblas_lab.pool.units import WorkUnits

    problem, (right, wrong) = synthetic_problems()[0], synthetic_catalogue()[:2]
    evaluations = (passed_evaluation(problem, right), failed_evaluation(problem, wrong))
    pool._slots[0].unit = WorkUnit(problem, [(problem, right), (problem, wrong)])
    for evaluation in evaluations:
        assert list(pool._done(Event(0, "answer", evaluation), WorkUnits([]))) == [evaluation]
    assert list(pool._proved) == [kernel_kind(problem, right)], "every worker proves a wrong kernel in full"
