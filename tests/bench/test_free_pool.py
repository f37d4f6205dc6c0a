"""Free kernels on several GPUs: shared in batches of the jail, each answered once whatever happens to a worker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_evaluator import FreeOptions
from outblas_lab.pool.gpu_pool import PoolEvaluator, WorkerSlot
from outblas_lab.pool.transport import EvaluateTask, EvaluatorSpec, Event, Task
from outblas_lab.pool.units import WorkUnit, WorkUnits
from outblas_lab.pool.worker_plan import LocalTransport
from support import free_workers, pool_workers
from support.free_fixture import BODY, cache_fixture, compiles, device_text, host_text  # noqa: F401
from support.helpers import ROOT, running
from support.pool_workers import VirtualTransport

P, Q = Problem(64, 64, 64), Problem(128, 64, 64)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


def kernel(number: int, order: str = "pid") -> FreeKernel:
    return FreeKernel.parse(f"// order: {order}\n" + device_text(BODY + f"int x{number};"))


def host(number: int) -> FreeKernel:
    return FreeKernel.parse(host_text(f"int x{number};"))


class Noting(VirtualTransport):
    """Remembers every task, by worker. A wait moves the clock by its own length at most."""

    def __init__(self, size: int) -> None:
        super().__init__(size, lambda task: 1.0)
        self.sent: list[tuple[int, EvaluateTask]] = []

    def send(self, worker: int, task: Task) -> None:
        if isinstance(task, EvaluateTask):
            self.sent.append((worker, task))
        super().send(worker, task)

    def wait(self, timeout_s: float) -> list[Event]:
        self.now += timeout_s
        return super().wait(0.0)


@pytest.fixture(name="judge")
def judge_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_workers, "Many", lambda: pool_workers.FreeJudge(str(tmp_path)), raising=False)


@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize(("workers", "counts"), [(1, [8, 2]), (2, [5, 5]), (4, [3, 3, 3, 1])])
def test_kernels_of_one_problem_are_shared_by_all_gpus(workers: int, counts: list[int]) -> None:
    transport = Noting(workers)
    pairs = [(P, kernel(n)) for n in range(10)]
    with PoolEvaluator(transport) as pool:
        found = {(e.problem, e.config): e for e in pool.evaluate(pairs)}
    assert set(found) == set(pairs)
    assert sorted((len(task.pairs) for _, task in transport.sent), reverse=True) == counts
    assert {worker for worker, _ in transport.sent} == set(range(workers))


@pytest.mark.usefixtures("judge")
def test_a_kernel_of_form_host_is_alone_and_no_proof_crosses_to_another_worker() -> None:
    transport = Noting(2)
    kernels = [kernel(1), host(1), kernel(2), host(2)]
    with PoolEvaluator(transport) as pool:
        assert len(list(pool.evaluate((P, one) for one in kernels))) == 4
        assert len(list(pool.evaluate((Q, one) for one in kernels))) == 4
    forms = [[k.launch.form for _, k in task.pairs] for _, task in transport.sent]  # type: ignore[attr-defined]
    assert Counter(map(tuple, forms)) == {("device",): 4, ("host",): 4}
    assert not any(task.proved for _, task in transport.sent)


@pytest.mark.usefixtures("judge")
def test_a_kernel_of_form_host_does_not_replace_known_baselines() -> None:
    with PoolEvaluator(Noting(1)) as pool:
        list(pool.evaluate([(P, kernel(1))]))
        list(pool.evaluate([(P, host(1)), (Q, host(1))]))
        assert pool.baselines(P) == {"cublas": 4.0}
        assert pool.baselines(Q) == {"cublas": 99.0}, "the only ones so far"
        list(pool.evaluate([(Q, kernel(2))]))
        assert pool.baselines(Q) == {"cublas": 4.0}


def test_templates_and_free_kernels_of_a_problem_are_units_of_their_own() -> None:
    template = Sm90WgmmaConfig(64, 64)
    units = WorkUnits([(P, template), (P, kernel(1)), (P, host(1)), (P, kernel(2))], workers=1)
    while units.draw():
        pass
    found = {}
    while (unit := units.take(0, ())) is not None:
        found[unit.form] = [config for _, config in unit.pairs]
    assert found == {"": [template], "device": [kernel(1), kernel(2)], "host": [host(1)]}


def test_kernels_that_come_one_by_one_are_gathered_while_all_gpus_are_busy() -> None:
    pairs = [pair for n in range(6) for pair in ((P, kernel(n)), None)]
    units = WorkUnits(iter(pairs), workers=2)
    dry = [units.dry for _ in range(12) if units.draw()]
    assert True in dry and False in dry
    sizes = [len(unit.pairs) for worker in (0, 1) if (unit := units.take(worker, [1 - worker])) is not None]
    assert sizes == [3, 3]


@pytest.mark.usefixtures("judge")
def test_a_pair_that_is_asked_for_later_does_not_wait_for_the_batch() -> None:
    """The second kernel becomes known once the first was handed out; the third after the second was answered."""
    transport, answered = Noting(2), list[Any]()

    def pairs() -> Iterator[Any]:
        yield P, kernel(1)
        while not transport.sent:
            yield None
        yield P, kernel(2)
        while len(answered) < 2:
            yield None
        yield P, kernel(3)

    with PoolEvaluator(transport) as pool:
        for evaluation in pool.evaluate(pairs()):
            answered.append(evaluation.config)
    assert answered == [kernel(1), kernel(2), kernel(3)]
    assert [worker for worker, _ in transport.sent[:2]] == [0, 1], "the second began beside the first"


def pool_of(factory: str, *arguments: tuple[Any, ...], **options: Any) -> PoolEvaluator:
    specs = [EvaluatorSpec(f"support.pool_workers:{factory}", each) for each in arguments]
    return PoolEvaluator(LocalTransport(specs), **options)


def test_a_worker_that_dies_costs_nothing_and_one_kernel_that_kills_costs_only_itself(tmp_path: Path) -> None:
    kernels = [kernel(0), kernel(1, "die"), *(kernel(n) for n in range(2, 6))]
    with pool_of("FreeJudge", (str(tmp_path),), (str(tmp_path),)) as pool:
        found = {e.config: e.status for e in pool.evaluate([(P, one) for one in kernels])}
        assert pool.lost == 1 and set(found.values()) == {Status.PASSED} and set(found) == set(kernels)
        assert Counter((tmp_path / "measured").read_text().split()) == Counter(one.name for one in kernels)
        killer, other = kernel(9, "kill"), kernel(8)
        found = {e.config: e.status for e in pool.evaluate([(P, killer), (Q, other)])}
    assert found == {killer: Status.EXITED, other: Status.PASSED}


def test_free_kernels_may_be_silent_for_as_long_as_the_jail_allows() -> None:
    limits = {"busy": 900.0}
    template = WorkerSlot("busy", WorkUnit(P, [(P, Sm90WgmmaConfig(64, 64))]))
    free = WorkerSlot("busy", WorkUnit(P, [(P, kernel(n)) for n in range(8)], "device"))
    assert template.is_overdue(901.0, limits) and not free.is_overdue(901.0, limits)
    assert free.is_overdue(901.0 + 8 * FreeOptions.candidate_s, limits)
    assert not WorkerSlot("idle").is_overdue(1e9, limits)


def test_a_pool_that_another_thread_closes_starts_no_worker(tmp_path: Path) -> None:
    pool = pool_of("FreeJudge", (str(tmp_path),))
    with pool:
        answers = pool.evaluate([(P, kernel(1)), (Q, kernel(2))])
        next(answers)
        pool.close()
        with pytest.raises(UsageError, match="closed"):
            list(answers)
    with pytest.raises(UsageError, match="closed"):
        list(pool.evaluate([(P, kernel(3))]))


@compiles
def test_two_gpus_judge_free_kernels_in_workers_that_were_prepared_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through processes, compilers, spare workers and sandboxes; only the judge is a fake."""
    monkeypatch.setenv(free_workers.LOG, str(tmp_path / "log"))
    (tmp_path / "log").touch()
    kernels = [kernel(1), kernel(2, "exit"), kernel(3), kernel(4)]
    with pool_of("live_free", (0,), (1,)) as pool:
        found = {e.config: e for e in pool.evaluate([(P, one) for one in kernels])}
        log = free_workers.notes()
    assert [found[one].status.value for one in kernels] == ["wrong", "exited", "wrong", "wrong"]
    assert len({found[one].detail.split()[0] for one in (kernels[0], kernels[2])}) == 2, "a worker of each GPU"
    for pid in {pid for word, pid in log if word == "turn"}:
        assert log.index(("prepared", pid)) < log.index(("turn", pid))
    end = time.monotonic() + 20
    while any(running(pid) for _, pid in log) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(running(pid) for _, pid in log), "they end with the pool"
