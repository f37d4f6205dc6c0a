"""The public commands on GPUs that are not here: a fake driver answers attributes, a fake evaluator answers times.

Nothing is packaged for these GPUs. A wrong floor, a wrong number of SMs or a wrong policy fails a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import config_name
from outblas.core.evaluation import Evaluation, Status
from outblas.core.gpu_records import nearest, user_record_path
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch import device_registry
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost.cost_model import predict_many
from outblas.records.library import Library
from outblas.records.user_library import user_library_path
from outblas.runtime import device
from outblas.tune import eval_problem, live_evaluator
from outblas.tune.agents.agent_registry import make_agent
from outblas_lab.agents.ppo import packaged_policy
from outblas_lab.jail.plausibility import is_below_floor
from support.cli_fixture import outblas
from support.fake_gpu import STATE, FakeGpu, timing
from support.gpus.fake_driver import DEVICES, FakeDevice, plug_in
from support.gpus.known import H100, H200

LARGE, FEW_ROWS = Problem(8192, 8192, 8192), Problem(8, 16384, 16384)
#: Short name -> agent that tunes there, so that each default agent has its turn.
AGENTS = {
    "A100": "heuristic",
    "A10": "ppo",
    "L40S": "regressor",
    "RTX 4090": "surrogate",
    "RTX 5090": "recorded",
    "H100 PCIe": "transfer",
    "B200": "random",
}


@pytest.fixture(name="fake", params=DEVICES)
def fake_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    fake = DEVICES[request.param]
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    plug_in(monkeypatch, fake)
    state = FakeGpu()

    def open_live(index: int = 0, options: Options | None = None, *_: Any, **__: Any) -> Any:
        return state.evaluator(index, options or Options(index, device.gpu_of_device(index)))

    monkeypatch.setattr(live_evaluator, "LiveEvaluator", open_live)
    monkeypatch.setattr(eval_problem, "LiveEvaluator", open_live)
    monkeypatch.setattr(eval_problem, "gpu_of_device", device.gpu_of_device)
    monkeypatch.setattr(eval_problem, "gpu_state", lambda index=0: dict(STATE))
    return fake


def name_of(fake: FakeDevice) -> str:
    return next(name for name, other in DEVICES.items() if other is fake)


def test_doctor_says_what_exists_and_the_command_that_adds_the_rest(fake: FakeDevice, monkeypatch: Any) -> None:
    from outblas.cli.checks import health

    gpu = device.gpu_of_device(0)
    arch = fake.attributes.arch
    monkeypatch.setattr(health, "_driver", lambda: ([health._Gpu(fake.attributes.product, divmod(arch, 10))], (13, 0)))
    monkeypatch.setattr(health, "find_part", lambda name: ())
    monkeypatch.setattr(health, "_packaged_cubins", lambda *_: health.Check("left out", None, "left out", "left out"))
    checks = {check.name: check for check in health.diagnose()}
    assert checks["gpu"].ok is True
    record, library = checks["gpu record"], checks["gpu library"]
    assert record.found.startswith(f"{gpu.name}: record estimated") and record.do == "outblas calibrate"
    assert ("never ran them on such a GPU" in record.found) == (arch != 90)
    assert "no packaged library; no own library" in library.found and library.do.startswith("outblas tune --suite llm")
    recorded = f"recording of {nearest(gpu, [H100, H200]).name}"
    for words in ("ranking model scaled from h200", "policy of h200", "catalogue of h200", recorded):
        assert words in library.found


def test_eval_works_and_has_the_floor_of_the_data_sheet(fake: FakeDevice, tmp_path: Path) -> None:
    floors = {}
    for problem in (LARGE, FEW_ROWS):
        done = outblas("eval", "--mnk", problem.mnk, "--base-dir", str(tmp_path))
        assert done.exit_code == 0, (done.stderr, done.exception)
        found = json.loads((tmp_path / f"eval_{problem.key}_offline.json").read_text())
        assert found["candidates_tried"] >= 12
        floors[problem] = found["floor_us"]
    assert floors[LARGE] == pytest.approx(LARGE.flops / fake.peak / 1e6, rel=0.12)
    assert floors[FEW_ROWS] == pytest.approx(FEW_ROWS.bytes / fake.bandwidth / 1e6, rel=0.03)


def test_the_plausibility_rule_takes_honest_times_only(fake: FakeDevice) -> None:
    gpu, config = device.gpu_of_device(0), candidates(LARGE, device.gpu_of_device(0))[0]
    honest = max(LARGE.flops / fake.peak, LARGE.bytes / fake.bandwidth) / 1e6 * 1.05
    for us, below in ((honest, False), (honest / 2, True)):
        assert is_below_floor(Evaluation(LARGE, config, Status.PASSED, "", None, timing(us)), gpu) is below


def test_tune_works_with_each_agent_and_installs_its_library(fake: FakeDevice, tmp_path: Path) -> None:
    gpu, agent = device.gpu_of_device(0), AGENTS[name_of(fake)]
    settings = ["--mnk", LARGE.mnk, "--mnk", FEW_ROWS.mnk, "--agent", agent, "--budget", "4", "--install"]
    done = outblas("tune", *settings, "--device", "cuda:0", "--run", str(tmp_path / "run"))
    assert done.exit_code == 0, (done.stderr, done.exception)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["gpu"], about["agent"]) == (gpu.name, agent)
    path = user_library_path(gpu.name)
    assert path is not None and [row.problem for row in Library.load(path).rows] == [LARGE, FEW_ROWS]


def test_dispatch_takes_no_foreign_data(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "gpu_of_device", device.gpu_of_device)
    state = device_registry._new_device(0)
    assert state.gpu == device.gpu_of_device(0)
    assert state.library.rows == () and state.any_shape is None


def test_a_damaged_record_leaves_products_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plug_in(monkeypatch, DEVICES["A100"])
    monkeypatch.setattr(device_registry, "gpu_of_device", device.gpu_of_device)
    path = user_record_path("a100-sxm4-80gb")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    device.forget_records()
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: GPU record .* cannot be read"):
        state = device_registry._new_device(0)
    assert state.gpu is None


def test_the_model_of_the_nearest_gpu_is_scaled_by_the_rates(fake: FakeDevice) -> None:
    gpu = device.gpu_of_device(0)
    for problem, us in ((LARGE, LARGE.flops / gpu.mma_tflops / 1e6), (FEW_ROWS, FEW_ROWS.bytes / gpu.hbm_tbs / 1e6)):
        configs = [c for c in candidates(problem, gpu) if not c.pdl]
        best = float(predict_many(problem, configs, gpu).min())
        limit = us if gpu.wgmma_tflops == 0 or problem is FEW_ROWS else problem.flops / gpu.wgmma_tflops / 1e6
        assert limit <= best <= 1.75 * limit, problem.key


def test_the_policy_of_the_nearest_gpu_proposes_what_is_good_here(fake: FakeDevice) -> None:
    gpu = device.gpu_of_device(0)
    assert packaged_policy(gpu) == "h200"
    for problem in (LARGE, FEW_ROWS):
        configs = [c for c in candidates(problem, gpu) if not c.pdl]
        times = dict(zip(map(config_name, configs), predict_many(problem, configs, gpu), strict=True))
        first = make_agent("ppo", 0, gpu).propose(problem, configs, [], 3)
        best, middle = min(times.values()), float(np.median(list(times.values())))
        assert min(times[config_name(c)] for c in first) <= min(1.5 * best, middle), problem.key


def test_gpus_without_wgmma_have_large_tiles(fake: FakeDevice) -> None:
    gpu: Gpu = device.gpu_of_device(0)
    offered = candidates(LARGE, gpu)
    tiles = {(c.bm, c.bn) for c in offered if c.family == "sm80_mma_gemm"}
    if gpu.wgmma_tflops > 0:
        assert any(c.family == "sm90_wgmma_gemm" for c in offered)
    else:
        assert {(256, 128), (128, 256), (128, 128)} <= tiles
        assert not any(c.family == "sm90_wgmma_gemm" for c in offered)
