"""A pool gives the answers of one evaluator, even if workers die meanwhile."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import LAUNCHES, config_name, launch_of
from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.evaluation_json import evaluation_to_json
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.tune import tune as tuning
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import Interrupted, tune
from outblas_lab.pool.gpu_pool import MAX_LOSSES_IN_A_ROW, PoolEvaluator
from outblas_lab.pool.transport import EvaluatorSpec, Task
from outblas_lab.pool.worker_plan import LocalTransport
from outblas_lab.recordings.replay import ReplayEvaluator
from support import pool_workers
from support.gpus.known import H200
from support.helpers import ROOT, SOURCE_PATH, running, synthetic_recording
from support.pool_workers import VirtualTransport

pytestmark = pytest.mark.long
RECORDING = synthetic_recording()
BUDGET = 6


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PROBLEMS_AT_ONCE", 5)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))  # spawned workers take the driver's sys.path


def run(evaluator: Evaluator, store: Path, agent: str = "evolution") -> Library:
    with Store(store) as opened:
        return tune(RECORDING.problems, make_agent(agent, 1, H200), BUDGET, evaluator, opened, "r")


def stored(path: Path) -> list[tuple[str, str, str]]:
    """All that a store holds, in an order of its own: workers finish in any."""
    with Store(path) as opened:
        return sorted(
            (e.problem.key, config_name(e.config), str(evaluation_to_json(e))) for e in opened.evaluations("r")
        )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, list[Any], list[str]]:
    """Library, store and measurements of the run that nothing disturbs, in this process."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PROBLEMS_AT_ONCE", 5)
        library = run(pool_workers.Logged(str(folder)), folder / "s.sqlite")
    return library, stored(folder / "s.sqlite"), pool_workers.measured(folder)


def specs(name: str, folder: Path, *more: Any, count: int = 2) -> list[EvaluatorSpec]:
    return [EvaluatorSpec(f"support.pool_workers:{name}", (str(folder), *more))] * count


def pool(name: str, folder: Path, *more: Any, count: int = 2, **options: Any) -> PoolEvaluator:
    return PoolEvaluator(LocalTransport(specs(name, folder, *more, count=count)), **options)


def test_several_processes_make_what_one_makes(tmp_path: Path, single: Any) -> None:
    library, store, measurements = single
    with pool("Logged", tmp_path) as evaluator:
        assert run(evaluator, tmp_path / "s.sqlite") == library
        assert len(evaluator.workers) == 2 and evaluator.lost == 0
    assert stored(tmp_path / "s.sqlite") == store
    assert pool_workers.measured(tmp_path) == measurements


@pytest.mark.parametrize("n", [1, 37])
def test_a_killed_worker_loses_nothing(tmp_path: Path, single: Any, n: int) -> None:
    library, store, measurements = single
    with pool("KilledOnce", tmp_path, n) as evaluator:
        assert run(evaluator, tmp_path / "s.sqlite") == library
        assert evaluator.lost == 1
    assert stored(tmp_path / "s.sqlite") == store
    assert pool_workers.measured(tmp_path) == measurements, "nothing is measured twice, nothing is left out"


def test_a_hung_worker_is_replaced(tmp_path: Path, single: Any) -> None:
    library, store, measurements = single
    with pool("StuckOnce", tmp_path, quiet_s=3.0) as evaluator:
        assert run(evaluator, tmp_path / "s.sqlite") == library
        assert evaluator.lost == 1
    assert stored(tmp_path / "s.sqlite") == store and pool_workers.measured(tmp_path) == measurements


def test_candidates_that_kill_every_worker_are_given_up_and_the_rest_is_measured(tmp_path: Path) -> None:
    poison = RECORDING.problems[3]
    with pool("KilledBy", tmp_path, poison.key) as evaluator:
        pairs = [(p, c) for p in RECORDING.problems[:5] for c in evaluator.candidates(p)[:2]]
        found = {(e.problem, e.config): e for e in evaluator.evaluate(iter(pairs))}
        assert evaluator.lost == 3
    assert set(found) == set(pairs)
    for (problem, _), evaluation in found.items():
        assert (evaluation.status is Status.EXITED) == (problem == poison)
        if problem == poison:
            assert "3 workers were lost while running it" in evaluation.detail and "exit code -9" in evaluation.detail


def test_a_run_without_workers_stops_with_one_line_and_resumes(tmp_path: Path, single: Any) -> None:
    library, store, measurements = single
    path = tmp_path / "s.sqlite"
    with pytest.raises(DeviceError, match="no worker is left .*the GPU is lost.*resumes"):
        mixed = [*specs("WithoutGpu", tmp_path, count=2)]
        with PoolEvaluator(LocalTransport(mixed)) as evaluator:
            run(evaluator, path)
    with Store(path) as opened:
        assert not opened.recorded_pairs("r")
    with pool("Logged", tmp_path) as evaluator:
        assert run(evaluator, path) == library
    assert stored(path) == store and pool_workers.measured(tmp_path) == measurements


def test_a_place_that_loses_its_workers_in_a_row_is_given_up(tmp_path: Path) -> None:
    with pool("KilledBy", tmp_path, "", count=1) as evaluator:
        pairs = [(p, evaluator.candidates(p)[0]) for p in RECORDING.problems[:4]]
        found: list[Evaluation] = []
        with pytest.raises(DeviceError, match="no worker is left"):
            found.extend(evaluator.evaluate(pairs))
        assert evaluator.lost == MAX_LOSSES_IN_A_ROW


def test_a_gpu_that_fails_leaves_its_work_to_the_others(tmp_path: Path, single: Any) -> None:
    both = [*specs("WithoutGpu", tmp_path, count=1), *specs("Logged", tmp_path, count=1)]
    with PoolEvaluator(LocalTransport(both)) as evaluator:
        assert run(evaluator, tmp_path / "s.sqlite") == single[0]
    assert stored(tmp_path / "s.sqlite") == single[1] and pool_workers.measured(tmp_path) == single[2]


@pytest.mark.parametrize("stop", [0, 33])
def test_an_interrupted_run_resumes_with_another_number_of_workers(tmp_path: Path, single: Any, stop: int) -> None:
    library, store, _ = single
    path = tmp_path / "s.sqlite"
    left = itertools.count()

    def interrupt(*_: object) -> None:
        if next(left) == stop:
            raise KeyboardInterrupt

    with Store(path) as opened, pool("Logged", tmp_path, count=2) as evaluator, pytest.raises(Interrupted):
        tune(RECORDING.problems, make_agent("evolution", 1, H200), BUDGET, evaluator, opened, "r", interrupt)
    with pool("Logged", tmp_path, count=1) as evaluator:
        assert run(evaluator, path) == library
    assert stored(path) == store


def test_a_pool_goes_on_after_a_batch_that_was_left(tmp_path: Path) -> None:
    with pool("Logged", tmp_path) as evaluator:
        pairs = [(p, evaluator.candidates(p)[0]) for p in RECORDING.problems]
        batch = evaluator.evaluate(pairs)
        next(batch)
        batch.close()
        assert {e.problem for e in evaluator.evaluate(pairs)} == set(RECORDING.problems)
        replay = ReplayEvaluator(RECORDING)
        for problem in (pairs[0][0], pairs[-1][0]):
            assert evaluator.baselines(problem) == replay.baselines(problem)
            for name in ("lt_auto", "torch"):
                assert evaluator.baseline_detail(problem, name) == replay.baseline_detail(problem, name)
        with pytest.raises(UsageError, match="not in the recording"):
            evaluator.candidates(Problem(8, 8, 8))
        assert evaluator.candidates(pairs[0][0]) == replay.candidates(pairs[0][0]), "an error is not the end of a pool"
        assert list(evaluator.evaluate([])) == []
        assert (evaluator.source, evaluator.gpu) == (replay.source, replay.gpu)


def test_all_workers_list_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing takes a single worker as long as two, and nothing is measured before."""
    recording = synthetic_recording(100)
    asked: list[int] = []
    monkeypatch.setattr(pool_workers, "Many", lambda: ReplayEvaluator(recording), raising=False)

    class Noting(VirtualTransport):
        def send(self, worker: int, task: Task) -> None:
            asked.append(worker)
            super().send(worker, task)

    problems = recording.problems[:20]
    with PoolEvaluator(Noting(2, lambda task: 1.0)) as evaluator:
        found = evaluator.candidates_of(problems)
        assert asked == [0, 1, 0] and list(found) == list(problems) and evaluator.candidates_of([]) == {}
    assert found == ReplayEvaluator(recording).candidates_of(problems)


def test_a_worker_that_dies_listing_candidates_is_replaced(tmp_path: Path) -> None:
    with pool("KilledListing", tmp_path) as evaluator:
        found = evaluator.candidates_of(RECORDING.problems)
        assert evaluator.lost == 1
    assert found == ReplayEvaluator(RECORDING).candidates_of(RECORDING.problems)


def test_a_kernel_that_is_not_surely_faster_is_not_installed(tmp_path: Path) -> None:
    with pool("Logged", tmp_path, 0.6) as evaluator:
        library = run(evaluator, tmp_path / "s.sqlite", "exhaustive")
    with Store(tmp_path / "s.sqlite") as opened:
        tried = list(opened.evaluations("r"))
    bounds = {
        (problem, launch): max(
            (e.speedup.low for e in tried if e.problem == problem and launch_of(e.config) == launch and e.speedup),
            default=0.0,
        )
        for problem in RECORDING.problems
        for launch in LAUNCHES[:2]
    }
    faster = {(e.problem, launch_of(e.config)) for e in tried if e.speedup and e.speedup.ratio > 1.05}
    fallen = {key for key in faster if bounds[key] < 0.99}  # faster by its median, but not surely
    assert fallen and any(low > 1.01 for low in bounds.values())
    for problem, launch in fallen:
        row = library.lookup(problem)
        assert row is not None and all(c is None or launch_of(c.config) != launch for c in (row.plain, row.pdl))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("unable", DeviceError, "no evaluator here"),
        ("missing", DeviceError, "has no attribute 'missing'"),
    ],
)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, name: str, error: type, words: str) -> None:
    transport = LocalTransport(specs(name, tmp_path))
    with pytest.raises(error, match=words), PoolEvaluator(transport):
        pass
    assert transport.pid(0) is None and transport.pid(1) is None


def test_workers_of_two_kinds_of_gpu_are_refused(tmp_path: Path) -> None:
    both = [*specs("Logged", tmp_path, count=1), *specs("OtherGpu", tmp_path, count=1)]
    with pytest.raises(UsageError, match="workers differ: .*h[12]00.*h[12]00"), PoolEvaluator(LocalTransport(both)):
        pass


def test_a_bug_of_the_evaluator_is_an_error_not_a_verdict(tmp_path: Path) -> None:
    with pool("Bug", tmp_path) as evaluator:
        pairs = [(p, evaluator.candidates(p)[0]) for p in RECORDING.problems]
        with pytest.raises(DeviceError, match="RuntimeError: a bug"):
            list(evaluator.evaluate(pairs))


def test_the_live_evaluator_keeps_its_sandbox_in_a_worker() -> None:
    problem, other = Problem(64, 64, 64), Problem(128, 64, 64)
    good, exits = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, stages=6)
    with PoolEvaluator(LocalTransport([EvaluatorSpec("support.pool_workers:live_without_gpu")] * 2)) as evaluator:
        assert len(_children(evaluator)) == 2, "each GPU's process is there before it is asked for anything"
        pairs = [(problem, good), (problem, exits), (other, good)]
        found = {(e.problem, e.config): e.status for e in evaluator.evaluate(pairs)}
        assert found == dict(zip(pairs, (Status.PASSED, Status.EXITED, Status.PASSED), strict=True))
        assert evaluator.baselines(problem) == {"cublas": 2.0} and evaluator.lost == 0
        assert evaluator.baseline_detail(problem, "cublas") == "default"
        assert evaluator.source == "cuda", "a run may go on with other GPUs of the kind"


def _children(evaluator: PoolEvaluator) -> list[str]:
    """Child processes of the workers."""
    workers = {place.split("process ")[1].split(",")[0] for place in evaluator.workers}
    parents = [path.read_text().rsplit(")", 1)[1].split()[1] for path in Path("/proc").glob("[0-9]*/stat")]
    return [parent for parent in parents if parent in workers]


# Ctrl-C, and a driver that is killed

DRIVER = """
import sys
from pathlib import Path
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.worker_plan import LocalTransport
from outblas_lab.pool.transport import EvaluatorSpec
from outblas.core.gpu_records import packaged_gpu
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune
from support.helpers import synthetic_recording

if __name__ == "__main__":
    folder = sys.argv[1]
    problems = synthetic_recording().problems
    try:
        with PoolEvaluator(LocalTransport([EvaluatorSpec("support.pool_workers:Slow", (folder,))] * 2)) as pool:
            with Store(folder + "/s.sqlite") as store:
                agent = make_agent("random", 1, packaged_gpu("h200"))
                tune(problems, agent, 6, pool, store, "r", lambda *_: print("one", flush=True))
    except KeyboardInterrupt as stop:
        print(stop, flush=True)
        sys.exit(130)
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_driver(tmp_path: Path, by: signal.Signals) -> None:
    paths = os.pathsep.join((SOURCE_PATH, str(ROOT / "tests")))
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert driver.stdout is not None and driver.stdout.readline() == "one\n"
    if by is signal.SIGINT:
        os.killpg(driver.pid, by)  # as a terminal does: to all of the group
    else:
        driver.kill()
    said, _ = driver.communicate(timeout=60)
    if by is signal.SIGINT:
        assert driver.returncode == 130 and "interrupted with" in said and "are saved in" in said
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert pids
    for _ in range(200):
        if not any(running(pid) for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its driver")
