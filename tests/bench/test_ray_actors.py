"""The same pool over Ray actors; one small cluster of this machine serves all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.evaluation import Status
from outblas.records.evaluation_json import evaluation_to_json
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.transport import EvaluatorSpec
from outblas_lab.pool.worker_plan import RayTransport, make_plan, open_pool
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import ROOT, SOURCE_PATH, synthetic_recording

pytestmark = pytest.mark.long
RECORDING = synthetic_recording()


def test_without_ray_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if not installed
    with pytest.raises(ToolchainMissing, match=r"pip install 'outblas-lab\[ray\]'"), open_pool(make_plan("ray")):
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((SOURCE_PATH, str(ROOT / "tests"))))  # for the workers
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
        yield ray
        ray.shutdown()


def run(evaluator: Any, path: Path) -> Library:
    with Store(path) as store:
        return tune(RECORDING.problems, make_agent("evolution", 1, H200), 6, evaluator, store, "r")


def stored(path: Path) -> list[str]:
    with Store(path) as opened:
        return sorted(str(evaluation_to_json(e)) for e in opened.evaluations("r"))


def pool(name: str, *arguments: Any) -> PoolEvaluator:
    return PoolEvaluator(RayTransport(EvaluatorSpec(f"support.pool_workers:{name}", arguments), 2, 0))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "more", "lost"), [pytest.param("Logged", (), 0, marks=pytest.mark.slow), ("KilledOnce", (29,), 1)]
)
def test_actors_make_what_one_process_makes(
    cluster: Any, tmp_path: Path, name: str, more: tuple[Any, ...], lost: int
) -> None:
    from support import pool_workers

    whole = run(ReplayEvaluator(RECORDING), tmp_path / "one.sqlite")
    with pool(name, str(tmp_path), *more) as evaluator:
        assert run(evaluator, tmp_path / "s.sqlite") == whole
        assert evaluator.lost == lost
    assert stored(tmp_path / "s.sqlite") == stored(tmp_path / "one.sqlite")
    found = pool_workers.measured(tmp_path)
    assert len(found) == len(set(found)) == len(stored(tmp_path / "s.sqlite"))
    assert cluster.is_initialized(), "a cluster that others use is not left"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_live_evaluator_keeps_its_sandbox_in_an_actor(cluster: Any) -> None:
    from outblas.core.problem import Problem
    from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig

    problem, good, exits = Problem(64, 64, 64), Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, stages=6)
    with PoolEvaluator(RayTransport(EvaluatorSpec("support.pool_workers:live_without_gpu"), 1, 0)) as evaluator:
        found = {e.config: e.status for e in evaluator.evaluate([(problem, good), (problem, exits)])}
        assert found == {good: Status.PASSED, exits: Status.EXITED}
        assert evaluator.baselines(problem) == {"cublas": 2.0} and evaluator.lost == 0


@pytest.mark.timeout(180)
def test_errors_cross_and_are_said(cluster: Any) -> None:
    with pytest.raises(DeviceError, match="the Ray cluster has no GPU"), open_pool(make_plan("ray")):
        pass
    with pytest.raises(UsageError, match="nowhere"), open_pool(make_plan("ray", "replay:nowhere", count=1)):
        pass
