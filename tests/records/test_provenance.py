"""Provenance is what the machine says, and absent where it says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.records import provenance


class NvmlError(Exception):
    pass


def fake_nvml(fail_at: str = "") -> Any:
    """NVML of a machine with one GPU; ``fail_at`` names the call that raises."""

    def call(name: str, value: Any) -> Any:
        def answer(*args: Any) -> Any:
            if name == fail_at or (name == "nvmlDeviceGetHandleByIndex" and args != (0,)):
                raise NvmlError(name)
            return value

        return answer

    values = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetHandleByPciBusId": "handle",
        "nvmlDeviceGetName": b"NVIDIA Test",
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetTemperature": 41,
    }
    constants = {"NVML_CLOCK_SM": 1, "NVML_TEMPERATURE_GPU": 0, "NVMLError": NvmlError}
    return SimpleNamespace(**constants, **{name: call(name, value) for name, value in values.items()})


def smi(monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    """No NVML; nvidia-smi answers ``output`` (None: it is not there)."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def run(command: list[str], **_: Any) -> Any:
        if output is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(returncode=0, stdout=output)

    monkeypatch.setattr(subprocess, "run", run)


def test_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert provenance.gpu_and_driver(0) == ("NVIDIA Test", "580.1")
    assert provenance.gpu_state(0) == {"sm_clock_mhz": 1755, "temperature_c": 41}


def test_the_gpu_that_cuda_counts_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's GPU 0 is not the first of the host where others are hidden."""
    asked: list[Any] = []
    nvml = fake_nvml(fail_at="nvmlDeviceGetHandleByIndex")
    nvml.nvmlDeviceGetHandleByPciBusId = lambda address: asked.append(address)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: f"0000:0{index}:00.0")
    assert provenance.gpu_state(1)["sm_clock_mhz"] == 1755
    smi(monkeypatch, "1980, 35\n")
    answer, commands = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda command, **more: commands.append(command) or answer(command, **more))
    assert provenance.gpu_state(1)["sm_clock_mhz"] == 1980
    assert asked == ["0000:01:00.0"] and "--id=0000:01:00.0" in commands[0]


def test_nvml_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, starts = fake_nvml(), []
    nvml.nvmlInit = lambda: starts.append(1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for _ in range(3):
        assert provenance.gpu_state(0)["sm_clock_mhz"] == 1755
    assert starts == [1]


def test_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, "NVIDIA Other, 570.2\n")
    assert provenance.gpu_and_driver(0) == ("NVIDIA Other", "570.2")
    smi(monkeypatch, "1980, 35\n")
    assert provenance.gpu_state(0) == {"sm_clock_mhz": 1980, "temperature_c": 35}


@pytest.mark.parametrize("output", ["[N/A], [N/A]\n", "", "no devices were found\n", None])
def test_unknown_state_is_none(output: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, output)
    assert provenance.gpu_state(0) == {"sm_clock_mhz": None, "temperature_c": None}


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetClockInfo"])
def test_nvml_that_fails_falls_back(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, "left, right\n")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(fail_at=call))
    found = provenance.gpu_and_driver(0)
    assert found == (("NVIDIA Test", "580.1") if call == "nvmlDeviceGetClockInfo" else ("left", "right"))


def test_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, None)
    assert provenance.gpu_and_driver(0) == (None, None)


def test_stuck_nvidia_smi_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, None)

    def hang(command: list[str], timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert provenance.gpu_and_driver(0) == (None, None)


def test_collect_is_complete_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMMIT", "abc123")
    found = json.loads(json.dumps(provenance.collect_provenance("outblas bench")))
    assert set(found) == {"gpu", "driver", "toolchain", "date", "commit", "command"}
    assert (found["commit"], found["command"]) == ("abc123", "outblas bench")
    assert {"nvrtc", "torch", "cublas", "python"} <= set(found["toolchain"])
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert timedelta(seconds=-1) <= age < timedelta(minutes=5)


def test_commit_of_a_file_that_git_does_not_track(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("OUTBLAS_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.source_commit() == "unknown"


def test_commit_says_when_files_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_COMMIT", raising=False)
    answers = {"ls-files": "provenance.py", "rev-parse": "f00d", "status": " M a.py"}
    monkeypatch.setattr(provenance, "_run", lambda command: answers[command[3]])
    assert provenance.source_commit() == "f00d-dirty"
    answers["status"] = ""
    assert provenance.source_commit() == "f00d"


def test_missing_toolchain_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise provenance.metadata.PackageNotFoundError(name)

    from outblas.core.errors import ToolchainMissing
    from outblas.runtime import nvrtc as compiling

    def no_nvrtc() -> str:
        raise ToolchainMissing("a", "b", "c")

    monkeypatch.setattr(provenance.metadata, "version", absent)
    monkeypatch.setattr(provenance, "_wheel", provenance._wheel.__wrapped__)  # it remembers what it found
    monkeypatch.setattr(compiling, "nvrtc_version", no_nvrtc)
    found = provenance.toolchain()
    assert (found["nvrtc"], found["torch"], found["cublas"]) == (None, None, None)


def test_the_command_of_a_script_is_quoted_and_has_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/anywhere/scale_out.py", "--out", "a b.json"])
    assert provenance.script_command("benchmarks/scale_out.py") == "python benchmarks/scale_out.py --out 'a b.json'"
    assert provenance.script_command("benchmarks/x.py", []) == "python benchmarks/x.py"
    assert provenance.script_command("benchmarks/x.py", ["--gpus", "0,1"]) == "python benchmarks/x.py --gpus 0,1"
