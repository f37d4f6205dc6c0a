"""An evolution and a training on several GPUs: what one GPU makes, whatever happens to a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas.core.rivals import RIVALS
from outblas.runtime.device import Device
from outblas_lab.jail.evaluation_file import load
from outblas_lab.llm.evaluators import EvaluatorChoice, choose_workers, parse_evaluator
from outblas_lab.llm.evolve_folder import read_run
from outblas_lab.llm.train.answer_judge import evaluator_of
from outblas_lab.llm.train.task_judge import task_evaluator
from outblas_lab.pool import worker_plan
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.transport import EvaluatorSpec
from outblas_lab.pool.worker_plan import LocalTransport, WorkerPlan
from support.evolve_fixture import evolve, in_turn, key_fixture, outcomes, recording_fixture  # noqa: F401
from support.helpers import ROOT
from support.llm_kernels import PROBLEM, answer, kernel
from support.llm_server import Say, serving

PLAN = WorkerPlan("local", Device(gpu_index=0), (0, 1))
SAYS = [Say(answer(kernel(n).text)) for n in (1, 50, 3, 51, 5, 7, 8, 9)]


@pytest.fixture(name="two_gpus")
def two_gpus_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outblas.runtime.device.gpu_count", lambda: 2)


def pooled(monkeypatch: pytest.MonkeyPatch, recording: Path, count: int, dies: str = "") -> list[PoolEvaluator]:
    """Put a pool of recorded workers under the next runs; the list fills with the pools."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    made: list[PoolEvaluator] = []

    def opened(plan: WorkerPlan) -> PoolEvaluator:
        spec = EvaluatorSpec("support.pool_workers:RecordedFree", (str(recording), dies))
        made.append(PoolEvaluator(LocalTransport([spec] * count)))
        return made[-1]

    monkeypatch.setattr(worker_plan, "open_pool", opened)
    return made


def test_a_run_on_two_gpus_has_the_outcomes_of_one_and_goes_on_with_three(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(in_turn(*SAYS)) as server:
        evolve(server, recording, tmp_path / "one", 8, parallel=4, turns=1)
    pools = pooled(monkeypatch, recording, 2)
    place = EvaluatorChoice("cuda", None, PLAN)
    with serving(in_turn(*SAYS)) as server:
        evolve(server, recording, tmp_path / "two", 5, parallel=4, turns=1, place=place)
        pooled(monkeypatch, recording, 3)
        evolve(server, recording, tmp_path / "two", 8, parallel=4, turns=1, place=place)
        assert len(server.requests) == 8
    assert sorted(outcomes(tmp_path / "two")) == sorted(outcomes(tmp_path / "one"))
    about = read_run(tmp_path / "two")
    assert about["device"] == "cuda" and len(about["provenance"]["workers"]) == 3 and len(pools) == 1
    assert len(load(tmp_path / "two" / "recorded.jsonl").evaluations) == 8


def test_a_worker_that_dies_costs_an_evolution_nothing(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pools, place) = pooled(monkeypatch, recording, 2, str(tmp_path / "died")), EvaluatorChoice("cuda", None, PLAN)
    with serving(in_turn(*SAYS)) as server:
        evolve(server, recording, tmp_path / "run", 8, parallel=4, turns=1, place=place)
    assert len(outcomes(tmp_path / "run")) == 8 and pools[0].lost == 1


@pytest.mark.usefixtures("two_gpus")
def test_several_gpus_are_named_like_one(tmp_path: Path) -> None:
    found = parse_evaluator("cuda:1,0")
    assert found.workers is not None and found.workers.gpus == (1, 0) and str(found) == "cuda" and found.runs_kernels
    assert parse_evaluator("cuda:1") == EvaluatorChoice("cuda:1", 1)
    with pytest.raises(UsageError, match="distinct"):
        parse_evaluator("cuda:1,1")
    with pytest.raises(DeviceError, match="no such GPU: 2"):
        parse_evaluator("cuda:0,2")
    with pytest.raises(UsageError, match="general kernels"):
        task_evaluator("copy", "cuda:0,1")


def test_workers_that_replay_run_no_kernels() -> None:
    with pytest.raises(DeviceError, match="cannot run kernels"):
        choose_workers(WorkerPlan("local", Device(recording="h200"), (), 2))


@pytest.mark.usefixtures("two_gpus")
def test_the_workers_of_a_training_prove_and_time_as_its_settings_say(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled(monkeypatch, recording, 2)
    opened, plans = worker_plan.open_pool, list[Any]()
    monkeypatch.setattr(worker_plan, "open_pool", lambda plan: plans.append(plan) or opened(plan))
    with evaluator_of("cuda:0,1", "cell") as evaluator:
        found = {e.config: e.status.value for e in evaluator.evaluate([(PROBLEM, kernel(n)) for n in (1, 50)])}
        assert evaluator.source == "cuda"
    assert found == {kernel(1): "passed", kernel(50): "wrong"}
    assert plans[0].gpus == (0, 1) and (plans[0].judging.level, plans[0].judging.baselines) == ("cell", RIVALS)
