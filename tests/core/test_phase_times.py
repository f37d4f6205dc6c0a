"""Phase times: each second is in one phase, and counts come back from every worker, lost ones included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.evaluation import Status
from outblas.core.phase_times import PhaseTimer, PhaseTotals, sum_totals
from outblas.core.problem import Problem
from outblas.core.suites import sample, suite
from outblas.judge.bench_cell import Options
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.tune.tune import tune
from outblas.workers.compile_ahead import BackgroundCompiler
from outblas.workers.sandbox import Sandbox, WorkerLoss
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.transport import EvaluateTask, EvaluatorSpec, Task
from outblas_lab.pool.worker_plan import LocalTransport
from support import pool_workers
from support.gpus.known import H200
from support.helpers import ROOT, synthetic_recording
from support.pool_workers import VirtualTransport


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_second_is_in_the_innermost_phase() -> None:
    clock = Clock()
    phase_timer = PhaseTimer("idle", clock)
    clock.now = 1.0
    with phase_timer.phase("outer"):
        clock.now = 3.0
        with pytest.raises(ValueError, match="odd"), phase_timer.phase("inner"):
            clock.now = 7.0
            raise ValueError("odd")
        clock.now = 15.0
        assert phase_timer.totals().seconds == {"idle": 1.0, "outer": 10.0, "inner": 4.0}
    clock.now = 31.0
    assert phase_timer.totals().seconds == {"idle": 17.0, "outer": 10.0, "inner": 4.0}, (
        "what was read is not read twice"
    )


def test_accounts_add_up_and_are_json() -> None:
    one, other = PhaseTotals({"a": 1.0, "b": 2.00049}, {"x": 1}), PhaseTotals({"b": 3.0}, {"x": 2, "y": 4})
    both = sum_totals([one, other])
    assert both == PhaseTotals({"a": 1.0, "b": 5.00049}, {"x": 3, "y": 4}) and sum_totals([]) == PhaseTotals()
    assert json.dumps(both.to_json()) == '{"seconds": {"b": 5.0, "a": 1.0}, "counts": {"x": 3, "y": 4}}'


def test_a_sandbox_remembers_what_its_lost_workers_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    with Sandbox("support.sandbox_handlers:accounting", (), 20.0, 60.0) as box:
        assert box.account == PhaseTotals()
        box.start()
        assert box.account.counts == {"started": 1}
        assert [value for _, value in box.run([1, 2])] == [1, 2] and [v for _, v in box.run([3])] == [3]
        assert box.account.counts == {"started": 1, "items": 3} and box.account.seconds["batch"] >= 0
        (_, lost), *_ = box.run(["exit"])
        assert isinstance(lost, WorkerLoss) and lost.status is Status.EXITED
        assert [v for _, v in box.run([4])] == [4]
        assert box.account.counts == {"started": 2, "items": 4}, "the lost one's last batch is not known"
    assert box.account.counts == {"started": 2, "items": 4}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, PhaseTotals]]:
    """Return the counts of one, two and four workers on 64 problems x 8 proposals of the heuristic."""
    problems = sample(suite("grid1000"), 64, 0, gpu=H200)
    offered = {problem: pool_workers.candidates(problem, H200) for problem in problems}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_workers, "candidates", lambda problem, gpu: offered[problem])
        for size in (1, 2, 4):
            transport = VirtualTransport(size, seconds, "support.pool_workers:Accounting")
            store = tmp_path_factory.mktemp("store") / "s.sqlite"
            with PoolEvaluator(transport) as pool, Store(store) as opened:
                tune(problems, make_agent("heuristic", 0, H200), 8, pool, opened, "r")
                found[size] = sum_totals(a for name, a in pool.accounts().items() if name.endswith(": gpu"))
    yield found


def seconds(task: Task) -> float:
    return 0.05 * len(task.pairs) if isinstance(task, EvaluateTask) else 0.0


def test_several_workers_do_hardly_more_than_one(counted: dict[int, PhaseTotals]) -> None:
    one = counted[1].counts
    assert one["candidates"] == 64 * 8 and one["kernels loaded"] == one["kernels proved"] > 100
    for size, more in ((2, 1.25), (4, 1.4)):  # kernels of exact rows are few problems' own
        several = counted[size].counts
        assert (several["candidates"], several["desks"]) == (one["candidates"], one["desks"])
        assert several["algorithms chosen"] <= 1.1 * one["algorithms chosen"]
        assert several["kernels proved"] <= 1.05 * one["kernels proved"]
        assert several["kernels loaded"] <= more * one["kernels loaded"]


def test_a_live_evaluator_accounts_for_both_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own side asks nvMatmulHeuristics, and compiles what that chooses with the candidates."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    problem, mine, theirs = Problem(64, 64, 64), Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(128, 128)
    monkeypatch.setattr(
        "outblas.judge.matmul_heuristics.nvmmh_configs", lambda problems, gpu: dict.fromkeys(problems, theirs)
    )
    compiled: list[Any] = []
    monkeypatch.setattr(BackgroundCompiler, "begin", lambda self, pairs: compiled.extend(pairs))
    with LiveEvaluator(0, Options(0, H200), 20.0, "support.sandbox_handlers:evaluations") as evaluator:
        assert [e.status for e in evaluator.evaluate([(problem, mine)])] == [Status.PASSED]
        accounts = evaluator.accounts()
    assert compiled == [(problem, mine), (problem, theirs)]
    assert accounts["host"].seconds.keys() == {"waiting", "expect", "compile", "ahead"}
    assert accounts["gpu"] == PhaseTotals({}, {"workers lost": 0}), "this handler keeps no ledger"


def test_accounts_of_workers_come_with_their_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    recording = synthetic_recording()
    pairs = [(p, c) for p in recording.problems[:6] for c in recording.catalogue[:2]]
    spec = EvaluatorSpec("support.pool_workers:KilledOnce", (str(tmp_path), 5))
    with PoolEvaluator(LocalTransport([spec] * 2)) as pool:
        assert pool.accounts().keys() == {"driver"}
        assert len(list(pool.evaluate(pairs))) == len(pairs) and pool.lost == 1
        accounts = pool.accounts()
    assert accounts["driver"].counts == {"units": 7, "workers lost": 1}, "what was lost is handed out once more"
    assert {"waiting", "agent"} < accounts["driver"].seconds.keys()
    workers = accounts.keys() - {"driver"}  # one that was lost over its first unit has told nothing
    assert workers and workers <= {"worker 0: host", "worker 1: host"}
    assert all(accounts[name].seconds.keys() == {"waiting", "task"} for name in workers)
