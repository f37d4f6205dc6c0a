"""Shipped cubins: taken where they are valid, and what happens where they are not, on a fake driver and compiler."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.cli.checks import health
from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import Source, make_source
from outblas.records.library import Library
from outblas.runtime import packaged_cubins
from outblas.runtime.cubin_pack import pack_bytes
from outblas.runtime.kernel_loader import ARCHITECTURE, load_kernel
from outblas.runtime.packaged_cubins import PackagedCubins
from support.gpus.known import H200
from support.packed_fixture import (  # noqa: F401
    ABOUT,
    OTHER,
    PACKED,
    PROBLEM,
    FakeDriver,
    compiled_fixture,
    driver_fixture,
    no_compiler,
    path_fixture,
)


@pytest.fixture(name="device")
def device_fixture(driver: FakeDriver, compiled: list[Source], path: Path) -> DeviceState:
    return DeviceState(H200, Library("h200", ()), load_kernel)


def silently(device: DeviceState, config: KernelConfig = PACKED) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return device.kernel_ready(PROBLEM, config)


def test_a_packed_kernel_needs_no_compiler(
    device: DeviceState, driver: FakeDriver, compiled: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch)
    assert silently(device)
    assert driver.images == [b"shipped sm90_wgmma_gemm"] and not compiled
    status = device.status()
    assert (status["kernels_loaded"], status["kernels_shipped"], status["compile_seconds"]) == (1, 1, 0.0)


def test_what_is_not_packed_is_compiled(device: DeviceState, driver: FakeDriver, compiled: list[Source]) -> None:
    assert silently(device) and silently(device, OTHER)
    assert device.kernel_ready(replace_layout(PROBLEM), PACKED)
    assert [s.family for s in compiled] == ["sm80_mma_gemm", "sm90_wgmma_gemm"]
    assert (device.status()["kernels_loaded"], device.status()["kernels_shipped"]) == (3, 1)


def replace_layout(problem: Problem) -> Problem:
    return replace(problem, layout="NN")


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_pack_can_be_switched_off(
    value: str, device: DeviceState, compiled: list[Source], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CUBINS", value)
    path.write_bytes(b"not even looked at")
    assert silently(device) and len(compiled) == 1 and device.status()["kernels_shipped"] == 0
    assert "OUTBLAS_CUBINS" in packaged_cubins.PACKAGED.why_not()


def test_without_a_pack_kernels_are_compiled_and_nothing_is_said(
    device: DeviceState, compiled: list[Source], path: Path
) -> None:
    path.unlink()
    assert silently(device) and len(compiled) == 1
    assert not packaged_cubins.PACKAGED.damaged
    assert "make build packs them" in packaged_cubins.PACKAGED.why_not()


def broken_table(data: bytes) -> bytes:
    return data[:80] + b"?" + data[81:]


def broken_cubin(data: bytes) -> bytes:
    return data[:-9] + bytes(9)


def other_kernels(data: bytes) -> bytes:
    return pack_bytes({}, {**ABOUT, "kernels": "0" * 64})


def no_toolchain(data: bytes) -> bytes:
    return pack_bytes({}, {"kernels": kernels_sha()})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:50], "bytes|cannot be used"),
        (lambda data: b"PK" + data, "starts with"),
        (broken_table, "table is damaged"),
        (broken_cubin, "cannot be used"),
        (other_kernels, "belong to other kernels"),
        (no_toolchain, "NVRTC version"),
    ],
)
def test_a_pack_that_cannot_be_used_is_told_once_and_kernels_are_compiled(
    spoil: Any, why: str, device: DeviceState, compiled: list[Source], driver: FakeDriver, path: Path
) -> None:
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(
        RuntimeWarning, match=f"compiles its kernels here: .*({why}).*outblas_lab.build.cubin_build"
    ) as told:
        assert device.kernel_ready(PROBLEM, PACKED)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert silently(device, OTHER) and silently(DeviceState(H200, Library("h200", ()), load_kernel))
    assert len(compiled) == 3 and all(image.startswith(b"compiled ") for image in driver.images)
    assert packaged_cubins.PACKAGED.damaged and packaged_cubins.PACKAGED.why_not()


def test_threads_that_meet_a_damaged_pack_say_so_once(path: Path) -> None:
    path.write_bytes(b"damaged")
    found = PackagedCubins(path)
    source, start, got = make_source(PROBLEM, PACKED), threading.Barrier(8), list[Any]()

    def ask() -> None:
        start.wait()
        got.append(found.get(source, ARCHITECTURE))

    with pytest.warns(RuntimeWarning) as told:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [None] * 8 and len(told) == 1


def test_a_kernel_of_another_architecture_is_not_taken(path: Path) -> None:
    found, source = PackagedCubins(path), make_source(PROBLEM, PACKED)
    assert found.get(source, "sm_80") is None and found.get(source, ARCHITECTURE) is not None


def test_what_the_driver_refuses_is_compiled_and_told_once(
    device: DeviceState, driver: FakeDriver, compiled: list[Source]
) -> None:
    driver.refused = (b"shipped",)
    with pytest.warns(RuntimeWarning, match="rejects a packaged cubin .*CUDA_ERROR_NO_BINARY_FOR_GPU") as told:
        assert device.kernel_ready(PROBLEM, PACKED)
    assert len(told) == 1 and "CUDA 13.0 or later (Linux: R580 or later)" in str(told[0].message)
    assert [image[:8] for image in driver.images] == [b"shipped ", b"compiled"]
    assert device.status()["kernels_shipped"] == 0 and not device.failed
    assert silently(DeviceState(H200, Library("h200", ()), load_kernel)) and len(compiled) == 2


@pytest.mark.parametrize("compiler", [True, False])
def test_what_cannot_be_loaded_at_all_is_torchs_in_one_line(
    compiler: bool, device: DeviceState, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.refused = (b"shipped", b"compiled")
    if not compiler:
        no_compiler(monkeypatch)
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: .*rejected the packaged cubin") as told:
        assert not device.kernel_ready(PROBLEM, PACKED)
    line = str(told[0].message)
    assert len(told) == 1 and "R580" in line and ("NVRTC cannot be loaded" in line) != compiler
    assert not silently(device) and len(device.status()["failures"]) == 1


def doctors_line(cuda: tuple[int, int] | None) -> health.Check:
    return health._packaged_cubins(cuda)


def test_the_doctor_says_which_drivers_load_the_pack(path: Path) -> None:
    fine = doctors_line((13, 1))
    assert fine.ok is True and not fine.do
    for part in ("1 kernels for sm_90a", "NVRTC 13.0 (wheel 13.0.88)", "CUDA 13.0 or later", "R580", "CUDA 13.1"):
        assert part in fine.found, fine
    assert doctors_line(None).ok is True
    old = doctors_line((12, 8))
    assert old.ok is False and "CUDA 12.8" in old.found and "CUDA 13.0" in old.do and "compiled here" in old.do
    assert doctors_line((14, 0)).ok is True


def test_the_doctor_without_a_pack_that_can_be_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the doctor's line is all that is said
        monkeypatch.setenv("OUTBLAS_CUBINS", "0")
        assert doctors_line(None).ok is None and "unset" in doctors_line(None).do
        monkeypatch.delenv("OUTBLAS_CUBINS")
        path.write_bytes(b"damaged")
        damaged = doctors_line((13, 0))
        assert (
            damaged.ok is False and "cannot be used" in damaged.found and "outblas_lab.build.cubin_build" in damaged.do
        )
        path.unlink()
        assert doctors_line(None).ok is None and "make build" in doctors_line(None).do


def test_the_driver_that_is_needed_is_known_before_the_first_kernel(path: Path, tmp_path: Path) -> None:
    assert PackagedCubins(path).driver_needed().startswith("CUDA 13.0 or later")
    assert PackagedCubins(tmp_path / "absent.pack").driver_needed() == "any CUDA"
