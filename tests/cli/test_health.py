"""The doctor reports; it never raises, and tells what is needed here from what is optional."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.cli.checks import health
from outblas.cli.checks.health import Check, diagnose
from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import CPU_TORCH
from outblas_lab.cli import lab_checks
from outblas_lab.jail import canary
from outblas_lab.jail.canary import AttackOutcome

H200 = health._Gpu("NVIDIA H200", (9, 0))
NAMES = {
    "python",
    "recording",
    "cache directory",
    "free disk (cache)",
    "free disk (here)",
    "driver",
    "gpu",
    "torch",
    "cuda.bindings",
    "nvrtc",
    "nvcc",
    "cutlass",
    "jail",
    "jail canary",
    "shipped cubins",
    "native path",
    "nvdisasm",
    "nvidia-matmul-heuristics",
    "extra [rl]",
    "extra [llm]",
    "extra [mcp]",
    "extra [train-llm]",
}


REAL_CANARY = canary.run_canary
HELD, THROUGH = AttackOutcome("read a file", True, "no"), AttackOutcome("open a socket", False, "")
UNTRIED = AttackOutcome("watch a folder", None, "Function not here")


@pytest.fixture(autouse=True)
def quick_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one starts a process, which only one test needs."""
    monkeypatch.setattr(canary, "run_canary", lambda: [HELD])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))


def machine(monkeypatch: pytest.MonkeyPatch, gpus: list[Any], cuda: tuple[int, int] | None) -> dict[str, Check]:
    monkeypatch.setattr(health, "_driver", lambda: (gpus, cuda))
    return {check.name: check for check in diagnose()}


@pytest.mark.parametrize(("gpus", "more"), [([], set()), ([H200], {"gpu record", "gpu library"})])
def test_every_check_is_one_line_and_says_what_to_do(gpus: list[Any], more: set[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(health, "_driver", lambda: (gpus, (13, 0) if gpus else None))
    checks = diagnose()
    assert {c.name for c in checks} == NAMES | more and len(checks) == len(NAMES | more)
    for check in checks:
        assert check.found and "\n" not in check.found + check.do
        assert bool(check.do) != (check.ok is True), check


def test_without_a_gpu_the_tool_chain_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_version", lambda package: None)
    found = machine(monkeypatch, [], None)
    for name in ("driver", "gpu", "torch", "cuda.bindings", "nvidia-matmul-heuristics"):
        assert found[name].ok is None and "pip install" not in found[name].do, found[name]
    assert "replay" in found["gpu"].do


def test_with_a_gpu_the_tool_chain_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object, **__: object) -> None:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "pip install 'outblas[gpu]'")

    monkeypatch.setattr(health, "_version", lambda package: None)
    monkeypatch.setattr(health, "compile_source", no_compiler)
    found = machine(monkeypatch, [H200], (13, 0))
    for name in ("torch", "cuda.bindings", "nvrtc", "nvidia-matmul-heuristics"):
        assert found[name].ok is False and "outblas[gpu]" in found[name].do, found[name]
    assert found["gpu"].ok is True and "NVIDIA H200 (sm_90)" in found["gpu"].found


def test_torch_without_cuda_is_a_fault_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(cuda=None))
    monkeypatch.setattr(health, "_version", lambda package: "2.0+cpu")
    monkeypatch.setattr(health.importlib, "import_module", lambda name: torch)
    assert health._torch(need=True).ok is False
    assert health._torch(need=False).ok is None


def test_torch_for_cuda_without_a_gpu_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wheels that torch brought, each once, and not with those that something else brought."""
    sizes = {"torch": 1.5e9, "nvidia-cublas": 0.75e9, "cuda-toolkit": 0.0, "triton": 0.5e9, "nvidia-other": 9e9}
    needed = {
        "torch": ["sympy>=1.13", "cuda-toolkit[cublas]==13.0; extra == 'x'", "triton==3.7; platform_system == 'Linux'"],
        "cuda-toolkit": ["nvidia-cublas==13.0.*; extra == 'cublas'", "nvidia-absent"],
    }
    monkeypatch.setattr(health, "_version", lambda name: "2.0" if name in sizes else None)
    monkeypatch.setattr(health.metadata, "files", lambda name: [SimpleNamespace(size=sizes[name])])
    monkeypatch.setattr(health.metadata, "requires", lambda name: needed.get(name))
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(health.importlib, "import_module", lambda name: torch)
    check = health._torch(need=False)
    assert check.ok is None and "2.8 GB that serve no GPU here" in check.found and CPU_TORCH in check.do
    assert health._torch(need=True) == Check("torch", True, "2.0, CUDA 13.0")


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(health, "_version", lambda package: "2.0")
    monkeypatch.setattr(health.importlib, "import_module", broken)
    check = health._torch(need=False)
    assert check.ok is False and "libcudart" in check.found and "more" not in check.found


def test_unsupported_gpu_and_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "nvrtc_version", lambda: "13.0 (wheel 13.0.88)")
    found = machine(monkeypatch, [health._Gpu("Old", (7, 0))], (12, 8))
    assert found["gpu"].ok is False and "sm_80" in found["gpu"].do
    assert found["driver"].ok is False and "13.0" in found["driver"].do


def test_the_native_path_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "why_not", lambda: "")
    assert health._native_path().ok is True
    for reason, do in (("not built (x); run y", "run y"), ("switched off by OUTBLAS_NATIVE", "unset OUTBLAS_NATIVE")):
        monkeypatch.setattr(health, "why_not", lambda reason=reason: reason)
        check = health._native_path()
        assert check.ok is None and check.found in reason and do in check.do


def test_cache_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = machine(monkeypatch, [], None)
    assert found["cache directory"].ok is False and "OUTBLAS_CACHE_DIR" in found["cache directory"].do


def test_cache_directory_is_left_empty(tmp_path: Path) -> None:
    diagnose()
    assert not list((tmp_path / "cache").iterdir())


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    found = machine(monkeypatch, [], None)
    assert found["free disk (here)"].ok is False and "free some space" in found["free disk (here)"].do


def test_damaged_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas_lab.recordings import recording

    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "a_cells.parquet").write_bytes(b"PAR1 cut off")
    monkeypatch.setattr(recording, "_package_root", lambda: tmp_path)
    check = machine(monkeypatch, [], None)["recording"]
    assert check.ok is False and check.required


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(health, "find_nvdisasm", broken)
    found = [c for c in diagnose() if c.ok is False and "inside" in c.found]
    assert len(found) == 1


def jail_canary(monkeypatch: pytest.MonkeyPatch, outcomes: list[AttackOutcome], complete: bool = True) -> Check:
    monkeypatch.setattr("outblas_lab.jail.landlock.abi", lambda: 7 if complete else 0)
    monkeypatch.setattr("outblas_lab.jail.seccomp.available", lambda: True)
    monkeypatch.setattr(canary, "run_canary", lambda: outcomes)
    return lab_checks._canary()


def test_a_canary_that_was_held_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    check = jail_canary(monkeypatch, [HELD, UNTRIED])
    assert check.ok is True and "held: read a file; could not be tried: watch a folder (Function" in check.found


def test_a_canary_that_got_through_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    check = jail_canary(monkeypatch, [HELD, THROUGH])
    assert check.ok is False and not check.required and "got through: open a socket" in check.found
    assert "container" in check.do and "report" in check.do


def test_a_canary_gets_through_where_the_kernel_has_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    check = jail_canary(monkeypatch, [THROUGH], complete=False)
    assert check.ok is None and "container" in check.do and "report" not in check.do


def test_doctor_lets_a_real_canary_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "run_canary", REAL_CANARY)
    check = machine(monkeypatch, [], None)["jail canary"]
    for attack in canary.ATTACKS:
        assert attack in check.found
