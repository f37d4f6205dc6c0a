"""Options of the command line for workers, and a pooled run from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.runtime.device import Device
from outblas_lab.pool import worker_plan as module
from outblas_lab.pool.compile_for_pool import BaselineKernels, CompileAhead
from outblas_lab.pool.worker_plan import WorkerPlan, make_plan, open_pool
from support.gpus.known import H200
from support.helpers import synthetic_recording


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_count", lambda: 3)
    monkeypatch.setattr("outblas.runtime.device.gpu_count", lambda: 3)


def test_plans(three_gpus: None) -> None:
    assert make_plan("local") == WorkerPlan("local", Device(gpu_index=0), (0, 1, 2))
    assert make_plan("local", gpus=(2, 0)).gpus == (2, 0)
    assert make_plan("local", "replay:h200") == WorkerPlan("local", Device(recording="h200"), (), 2)
    assert make_plan("local", "replay:h200", count=5).count == 5
    assert make_plan("ray") == WorkerPlan("ray", Device(gpu_index=0), (), None, "auto")
    assert make_plan("ray", count=3, ray_address="head:6379").ray_address == "head:6379"
    assert str(make_plan("ray")) == str(make_plan("local")) == "cuda", "a run may be resumed with the other"
    assert str(make_plan("ray", "replay:h200")) == "replay:h200"


def test_without_a_gpu_local_workers_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (f"{module.__name__}.gpu_count", "outblas.runtime.device.gpu_count"):
        monkeypatch.setattr(name, lambda: 0)
    assert make_plan("local").device == Device(recording="h200")
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        make_plan("local", gpus=(0, 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "slurm"}, "unknown workers 'slurm'.*local or ray"),
        ({"kind": "local", "count": 0, "device": "replay:h200"}, "--worker-count is 0"),
        ({"kind": "local", "count": 10**6, "device": "replay:h200"}, "--worker-count is 1000000"),
        ({"kind": "local", "count": 2}, "--worker-count conflicts with local GPUs"),
        ({"kind": "local", "device": "cuda:1"}, "--workers rejects --device cuda:1.*--gpus"),
        ({"kind": "local", "device": "replay:h200", "gpus": (0,)}, "--gpus"),
        ({"kind": "local", "gpus": (0, 0)}, "GPU indices"),
        ({"kind": "local", "ray_address": "auto"}, "--ray-address conflicts with --workers local"),
        ({"kind": "ray", "gpus": (0,)}, "--gpus.*--worker-count"),
    ],
)
def test_options_that_do_not_go_together(three_gpus: None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(**options)


def test_a_gpu_that_is_not_there(three_gpus: None) -> None:
    with pytest.raises(DeviceError, match="no such GPU: 3"):
        make_plan("local", gpus=(0, 3))


def test_an_unknown_recording_is_the_users_error() -> None:
    with pytest.raises(UsageError, match="nowhere"), open_pool(make_plan("local", "replay:nowhere", count=1)):
        pass


def test_options_of_workers_need_workers() -> None:
    for option, value in (("--gpus", "0,1"), ("--worker-count", "2"), ("--ray-address", "auto")):
        result = CliRunner().invoke(app, ["tune", option, value])
        assert result.exit_code == 2 and f"{option} needs --workers" in result.stderr


def test_a_pooled_run_is_the_single_run(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path / "recording")
    arguments = ["tune", "--mnk", "64_128_256", "--mnk", "128_128_256", "--mnk", "192_256_256", "--agent", "evolution"]
    arguments += ["--budget", "6", "--device", f"replay:{tmp_path / 'recording'}", "--run"]
    for run, more in (("one", []), ("several", ["--workers", "local", "--worker-count", "2"])):
        # The provenance of a library names the run, which is the folder's name.
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / run / "run"), *more])
        assert result.exit_code == 0, result.stderr
    one, several = (tmp_path / run / "run" for run in ("one", "several"))
    assert (one / "library.json").read_bytes() == (several / "library.json").read_bytes()
    device = {json.loads((run / "run.json").read_text())["device"] for run in (one, several)}
    assert device == {f"replay:{tmp_path / 'recording'}"}
    times = json.loads((several / "times.json").read_text())
    assert "waiting" in times["driver"]["seconds"]
    # One worker may do all units of so short a run before the other has started.
    assert times.keys() & {"worker 0: host", "worker 1: host"}
    assert not (one / "times.json").exists()
    again = CliRunner().invoke(app, [*arguments, str(several)])  # a finished run of a pool, taken up by one evaluator
    assert again.exit_code == 0, again.stderr
    assert (one / "library.json").read_bytes() == (several / "library.json").read_bytes()


def test_the_driver_compiles_the_baselines_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that comes upon one uncompiled compiles it on its one core, and its GPU waits."""
    mine, theirs = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(128, 128)
    asked: list[list[Problem]] = []

    def choose(problems: list[Problem], gpu: Gpu) -> dict[Problem, KernelConfig | None]:
        asked.append(list(problems))
        return {p: theirs if p.m == 64 else None for p in problems}

    monkeypatch.setattr("outblas.judge.matmul_heuristics.nvmmh_configs", choose)
    compiled: list[Any] = []
    monkeypatch.setattr(CompileAhead, "compile", lambda self, pairs: compiled.extend(pairs) or iter(()))
    make = module._compiler(WorkerPlan("local", Device(gpu_index=0), (0, 1)))
    assert make is not None and module._compiler(WorkerPlan("ray", Device(gpu_index=0))) is None
    compile, one, other = make(H200), Problem(64, 64, 64), Problem(128, 64, 64)
    list(compile([(one, mine), (other, mine)]))
    list(compile([(other, theirs)]))
    assert compiled == [(one, mine), (other, mine), (one, theirs), (other, theirs)] and asked == [[one, other]]


def test_without_the_package_there_are_no_baselines_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(problems: list[Problem], gpu: Gpu) -> None:
        raise ToolchainMissing("nvMatmulHeuristics is not installed", "its wheel", "pip install '.[gpu]'")

    monkeypatch.setattr("outblas.judge.matmul_heuristics.nvmmh_configs", missing)
    assert BaselineKernels(H200).of([Problem(64, 64, 64)]) == []
