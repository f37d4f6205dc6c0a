"""``outblas calibrate`` on a fake driver: it writes a record, which later commands read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core import gpu_records
from outblas.core.roofline import Gpu
from outblas.runtime import device
from outblas.tune.calibrate import calibration
from outblas.tune.calibrate.probe_runner import Probe
from support.cli_fixture import assert_refused, outblas
from support.gpus.fake_driver import DEVICES, FakeDevice, plug_in

RATES = {"mma_tflops": 250.0, "mma_acc16": 260.0, "hbm_tbs": 1.8, "l2_tbs": 5.0}


class FakeRunner:
    """Times of an A100 whose rates are :data:`RATES`."""

    def __init__(self, index: int, gpu: Gpu) -> None:
        self.gpu = gpu

    def __enter__(self) -> FakeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def samples_us(self, probe: Probe, seconds: float) -> tuple[int, list[float]]:
        us = probe.work(10) / RATES[probe.figure] / 1e6
        return 10, [2 * us, us, us]

    def graph_us(self, nodes: int) -> float:
        return 5.0 + 1.25 * nodes

    def clusters(self) -> tuple[int, ...]:
        return ()


@pytest.fixture(name="a100")
def a100_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    fake = DEVICES["A100"]
    plug_in(monkeypatch, fake)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "device_attributes", lambda index: fake.attributes)
    monkeypatch.setattr(calibration, "ProbeRunner", FakeRunner)
    return fake


def test_the_record_is_written_and_then_used(a100: FakeDevice, tmp_path: Path) -> None:
    before = device.gpu_of_device(0)
    done = outblas("calibrate")
    assert done.exit_code == 0, done.stderr
    path = tmp_path / "outblas" / "gpus" / "a100-sxm4-80gb.json"
    assert done.stdout.splitlines()[0] == f"NVIDIA A100-SXM4-80GB: wrote {path}"
    assert "mma_tflops 250" in done.stderr and "launch_us 1.25" in done.stderr
    gpu = device.gpu_of_device(0)
    assert (gpu.tflops, gpu.acc16_tflops, gpu.hbm_tbs, gpu.l2_tbs, gpu.launch_us) == (250.0, 260.0, 1.8, 5.0, 1.25)
    assert before.name == gpu.name and before.tflops > gpu.tflops
    assert device.record_of_device(0).origin == "user"


def test_the_document_holds_the_record(a100: FakeDevice, tmp_path: Path) -> None:
    done = outblas("calibrate", "--json", "--out", str(tmp_path / "r.json"))
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["schema"], found["gpu"]) == ("outblas-calibrate", "a100-sxm4-80gb")
    assert found["record"] == json.loads((tmp_path / "r.json").read_text())
    assert gpu_records.user_records() == []


def test_busy_gpus_are_refused(a100: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(RATES, "hbm_tbs", 0.01)
    assert_refused_after_progress(outblas("calibrate"), "hbm_tbs was measured as 0.01", "stop other programs")
    assert not (tmp_path / "outblas").exists()


def assert_refused_after_progress(result: Any, *words: str) -> None:
    last = result.stderr.strip().splitlines()[-1]
    assert result.exit_code == 2 and last.startswith("error: ") and all(word in last for word in words), last


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    assert_refused(outblas("calibrate"), "no CUDA GPU was found")
