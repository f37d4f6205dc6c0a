"""benchmarks/scale_out.py: GPUs that --together does not have, or would not take, are refused before anything runs."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.evaluation import Evaluation, Status
from outblas.core.phase_times import PhaseTotals
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.source import make_source
from support.helpers import ROOT, module_of_file


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "benchmarks" / "scale_out.py", monkeypatch)


@pytest.mark.parametrize(
    ("gpus", "visible", "told"),
    [("2,3", None, "takes GPU 0"), ("0,1", "4,5", "fewer than 3 GPUs"), ("0,1", "", "fewer than 3 GPUs")],
)
def test_together_takes_the_first_gpus_that_are_visible(
    gpus: str, visible: str | None, told: str, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(script, "timed", lambda *arguments: pytest.fail("it must not run"))
    monkeypatch.setattr(sys, "argv", ["scale_out.py", "--together", "--gpus", gpus])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_together_gives_each_run_gpus_of_its_own(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Done:
        returncode = 0

        def communicate(self) -> tuple[str, None]:
            return "words\n{}\n", None

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    monkeypatch.setattr(script, "part", lambda arguments, visible_gpus, command: given.append(visible_gpus) or Done())
    assert script.together(None, 2, "command") == ({}, {}) and given == [["7"], ["5", "3"]]


def test_both_runs_account_for_their_seconds(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def timed(arguments: Any, gpus: tuple[int, ...], command: str) -> dict[str, Any]:
        phase_totals = {"driver": PhaseTotals({"agent": 2.0, "other": 0.01}, {"units": 7}).to_json()}
        figures = {"start_seconds": 1.0, "tune_seconds": 8.0 / len(gpus), "passed": 4, "measurements": 4}
        tasks = {1: (4.0,), 2: (2.0, 1.0)}[len(gpus)]
        phase_totals |= {
            f"worker {gpu}: host": {"seconds": {"task": seconds}, "counts": {}}
            for gpu, seconds in zip(gpus, tasks, strict=True)
        }
        return {"gpus": list(gpus), **figures, "ledger": phase_totals}

    monkeypatch.setattr(script, "timed", timed)
    monkeypatch.setattr(sys, "argv", ["scale_out.py", "--filled", "--out", str(tmp_path / "out.json")])
    script.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ratio"] == 2.0 and found["one"]["ledger"]["driver"]["seconds"] == {"agent": 2.0, "other": 0.01}
    told = capsys.readouterr().out
    assert told.count("driver: agent 2.0 s, 7 units\n") == 2
    assert "2 GPUs are 2.00x as fast as one, 1.50x on equal work;" in told


def test_filling_compiles_the_baselines_kernels_too(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Sm90WgmmaConfig(64, 64)
    monkeypatch.setattr(
        "outblas.judge.matmul_heuristics.nvmmh_configs", lambda problems, gpu: dict.fromkeys(problems, kernel)
    )
    asked: list[Any] = []
    monkeypatch.setattr(script, "compile_many", lambda sources, arch: asked.extend(sources) or iter(()))
    script.fill(Namespace(suite="grid1000", sample=1, seed=0, budget=2, agent="heuristic", free=False))
    assert len(asked) == 3 and asked[0] == make_source(Problem(64, 64, 64), kernel)


def test_free_kernels_are_compared_by_the_seconds_of_their_evaluation(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Both runs evaluate every pair, the one on one GPU, the other on two."""
    ran: list[tuple[int, ...]] = []

    def answers(gpus: tuple[int, ...]) -> Any:
        class Pool:
            lost = 0

            def evaluate(self, pairs: Any) -> Any:
                ran.append(gpus)
                return (Evaluation(problem, kernel, Status.WRONG) for problem, kernel in pairs)

            def accounts(self) -> dict[str, Any]:
                return {}

            def provenance(self, command: str) -> dict[str, Any]:
                return {"command": command}

        return contextlib.nullcontext(Pool())

    monkeypatch.setattr(script, "make_plan", lambda kind, gpus: gpus)
    monkeypatch.setattr(script, "open_pool", answers)
    clock = iter([0.0, 1.0, 1.0, 9.0, 0.0, 1.0, 1.0, 5.0])  # opened, ready, begun, done
    monkeypatch.setattr(script, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "argv", ["scale_out.py", "--free", "--filled", "--out", str(tmp_path / "out.json")])
    script.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert ran == [(0,), (0, 1)] and found["settings"]["free"] is True
    assert found["ratio"] == 2.0 and found["one"]["evaluate_seconds"] == 8.0
    assert found["one"]["measurements"] == found["several"]["measurements"] == len(script.free_pairs())
    assert {problem for problem, _ in script.free_pairs()} == set(script.FREE_PROBLEMS)
    assert "4.0 s to evaluate" in capsys.readouterr().out
