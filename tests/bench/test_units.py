"""Order of work units for a pool's workers, and the messages between workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import kernel_kind
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import work_us
from outblas.records.store import Store
from outblas.tune import tune as tuning
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.transport import EvaluateTask, Task
from outblas_lab.pool.units import WorkUnits
from outblas_lab.recordings.replay import ReplayEvaluator
from support import pool_workers
from support.gpus.known import H200
from support.helpers import ROOT, synthetic_problems, synthetic_recording
from support.pool_workers import VirtualTransport

RECORDING = synthetic_recording()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PROBLEMS_AT_ONCE", 5)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))  # spawned workers take the driver's sys.path


# How busy the hand-out keeps workers, by a clock that only the work moves


def test_workers_are_busy_until_the_end_of_a_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Problems of unequal work: the barrier between batches costs
    less than a tenth of the time of two workers, and of four."""
    monkeypatch.setattr(tuning, "PROBLEMS_AT_ONCE", 64)
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(synthetic_recording(100)), raising=False)
    most = max(work_us(p, H200) for p in synthetic_problems(100))

    def seconds(task: Task) -> float:
        if not isinstance(task, EvaluateTask):
            return 0.0
        return len(task.pairs) * (0.1 + work_us(task.pairs[0][0], H200) / most)

    took, libraries = {}, []
    for size in (1, 2, 4):
        transport = VirtualTransport(size, seconds)
        with PoolEvaluator(transport) as evaluator, Store(tmp_path / f"{size}.sqlite") as store:
            libraries.append(tune(synthetic_problems(100), make_agent("evolution", 0, H200), 8, evaluator, store, "r"))
        took[size] = transport.now
    assert libraries[0] == libraries[1] == libraries[2]
    assert took[1] / took[2] >= 1.8 and took[1] / took[4] >= 3.6


def test_a_problem_stays_with_the_worker_that_has_prepared_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work that is done once per problem, such as the choice of cuBLASLt's algorithm, is rarely done by two workers."""
    monkeypatch.setattr(tuning, "PROBLEMS_AT_ONCE", 64)
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(synthetic_recording(100)), raising=False)
    prepared: set[tuple[Problem, int]] = set()

    def seconds(task: Task, worker: int) -> float:
        if not isinstance(task, EvaluateTask):
            return 0.0
        at = task.pairs[0][0], worker
        new = at not in prepared
        prepared.add(at)
        return 1.0 + new

    class Preparing(VirtualTransport):
        def send(self, worker: int, task: Task) -> None:
            self._seconds = lambda task: seconds(task, worker)
            super().send(worker, task)

    took, problems = {}, synthetic_problems(100)
    for size in (1, 2):
        prepared.clear()
        transport = Preparing(size, lambda task: 0.0)
        with PoolEvaluator(transport) as evaluator, Store(tmp_path / f"{size}.sqlite") as store:
            tune(problems, make_agent("evolution", 0, H200), 16, evaluator, store, "r")
        took[size] = transport.now
    assert len(prepared) <= 1.05 * len(problems)
    assert took[1] / took[2] >= 1.9


def test_pairs_are_drawn_while_workers_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent thinks about the next problems while the first is measured."""
    events: list[str] = []

    class Noting(VirtualTransport):
        def send(self, worker: int, task: Task) -> None:
            events.append("sent")
            super().send(worker, task)

    def pairs() -> Iterator[Any]:
        for problem in RECORDING.problems[:4]:
            events.append("drawn")
            yield problem, RECORDING.catalogue[0]

    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(RECORDING), raising=False)
    with PoolEvaluator(Noting(1, lambda task: 1.0)) as evaluator:
        assert len(list(evaluator.evaluate(pairs()))) == 4
    assert "drawn" in events[events.index("sent") :]
    assert events.count("sent") == events.count("drawn") == 4


def test_a_unit_is_handed_out_once_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(RECORDING), raising=False)
    compiled: list[Any] = []
    early: list[Any] = []

    class Checking(VirtualTransport):
        def send(self, worker: int, task: Task) -> None:
            early.extend(set(task.pairs) - set(compiled) if isinstance(task, EvaluateTask) else ())
            super().send(worker, task)

    def compile_them(pairs: Sequence[Any]) -> Iterator[object]:
        for pair in pairs:
            compiled.append(pair)
            yield pair

    pairs = [(p, RECORDING.catalogue[0]) for p in RECORDING.problems]
    with PoolEvaluator(Checking(2, lambda task: 1.0), lambda gpu: compile_them) as evaluator:
        assert len(list(evaluator.evaluate(pairs))) == len(pairs)
    assert sorted(compiled, key=str) == sorted(pairs, key=str) and not early


def test_what_one_worker_proved_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(RECORDING), raising=False)
    told: dict[int, list[Any]] = {0: [], 1: []}
    late: list[Any] = []

    class Noting(VirtualTransport):
        def send(self, worker: int, task: Task) -> None:
            assert isinstance(task, EvaluateTask)
            late.extend(kind for kind in task.proved if kind in told[worker])
            told[worker] += task.proved
            super().send(worker, task)

    problem = RECORDING.problems[0]
    passed = RECORDING.catalogue[RECORDING.recorded_mask(problem).nonzero()[0][0]]
    with PoolEvaluator(Noting(2, lambda task: 1.0)) as evaluator:
        (first,) = evaluator.evaluate([(problem, passed)])
        assert first.status is Status.PASSED and told == {0: [], 1: []}
        failed = [c for c in RECORDING.catalogue if not RECORDING.recorded_mask(problem)[RECORDING.catalogue_index(c)]]
        list(evaluator.evaluate([(p, failed[0] if failed else passed) for p in RECORDING.problems[1:5]]))
        assert told[0][:1] == told[1][:1] == [kernel_kind(problem, passed)] and not late


def test_kernels_that_another_worker_has_are_begun_last() -> None:
    """A second worker loads a kernel again, and proves it again if the first has not answered yet."""
    first, other = synthetic_recording(100).catalogue[:2]
    problems = sorted(synthetic_problems(100), key=lambda p: work_us(p, H200), reverse=True)[:6]
    pairs = [(p, other if p == problems[3] else first) for p in problems]

    def handed_out(elsewhere: set[Any]) -> list[Problem]:
        units = WorkUnits(iter(pairs))
        while units.draw():
            pass
        taken = []
        while (unit := units.take(0, [1], elsewhere)) is not None:
            taken.append(unit.problem)
        return taken

    assert handed_out(set()) == problems, "the longest first"
    assert handed_out({kernel_kind(problems[0], first)}) == [problems[3], *problems[:3], *problems[4:]]


def test_the_pool_knows_which_kernels_its_workers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(RECORDING), raising=False)
    asked: list[tuple[int, set[Any]]] = []
    take = WorkUnits.take

    def noting(self: WorkUnits, worker: int, others: Any, elsewhere: Any = frozenset()) -> Any:
        unit = take(self, worker, others, elsewhere)
        if unit is not None:
            asked.append((worker, set(elsewhere)))
        return unit

    monkeypatch.setattr(WorkUnits, "take", noting)
    problem, (one, other) = RECORDING.problems[0], RECORDING.catalogue[:2]
    pairs = [(problem, one), *((p, other) for p in RECORDING.problems[1:4])]
    with PoolEvaluator(VirtualTransport(2, lambda task: 1.0)) as evaluator:
        assert len(list(evaluator.evaluate(pairs))) == 4
        assert asked[:2] == [(0, set()), (1, {kernel_kind(problem, one)})], "the other was given it"
        assert (0, {kernel_kind(problem, other)}) in asked and asked[-1][1] <= {kernel_kind(problem, one)}
        evaluator._slots[0].kernels.add(())
        evaluator._start(0)
        assert not evaluator._slots[0].kernels, "a new worker has none"


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(RECORDING), raising=False)

    def refuse(pairs: Sequence[Any]) -> Iterator[object]:
        raise ToolchainMissing("NVRTC cannot be loaded", "its wheel", "pip install '.[gpu]'")

    with (
        PoolEvaluator(VirtualTransport(1, lambda task: 1.0), lambda gpu: refuse) as evaluator,
        pytest.raises(ToolchainMissing, match="NVRTC"),
    ):
        list(evaluator.evaluate([(RECORDING.problems[0], RECORDING.catalogue[0])]))
