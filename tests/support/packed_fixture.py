"""Kernels that a pack has or lacks, cubins made up for them, and a driver and a compiler that take them."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from outblas.cli.checks import health
from outblas.core.errors import ToolchainMissing
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import Source, make_source
from outblas.runtime import launch, packaged_cubins
from outblas.runtime import nvrtc as compiling
from outblas.runtime.cubin import Cubin, SassFacts
from outblas.runtime.cubin_pack import pack_bytes, pack_key
from outblas.runtime.kernel_loader import ARCHITECTURE
from outblas.runtime.packaged_cubins import PackagedCubins

PROBLEM = Problem(64, 128, 256)
PACKED, OTHER = Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64)
FACTS = SassFacts(4, 0, 0, 2, 1, 0, 0, 0, ("fp32",))
ABOUT = {"nvrtc": "13.0 (wheel 13.0.88)", "kernels": kernels_sha(), "architectures": ["sm_90a"]}


def cubin(source: Source, made: bytes) -> Cubin:
    return Cubin(made + source.family.encode(), source.entry, ARCHITECTURE, 168, 0, 0, 0, FACTS, 0.2, False, "log")


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's pack, for the time of a test: of PACKED, and not of OTHER."""
    path = tmp_path / "kernels.pack"
    source = make_source(PROBLEM, PACKED)
    path.write_bytes(pack_bytes({pack_key(source, ARCHITECTURE): cubin(source, b"shipped ")}, ABOUT))
    monkeypatch.setattr(packaged_cubins, "PACKAGED", PackagedCubins(path))
    monkeypatch.setattr(health, "PACK", path)
    monkeypatch.delenv("OUTBLAS_CUBINS", raising=False)
    return path


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class FakeDriver:
    """Loads what it does not refuse.

    Attributes:
        refused: beginnings of images that it does not load. images: those that it was given.
    """

    def __init__(self) -> None:
        self.refused: tuple[bytes, ...] = ()
        self.images: list[bytes] = []

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return Status.CUDA_SUCCESS, 77

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, int | None]:
        self.images.append(image)
        if image.startswith(self.refused):
            return Status.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        return Status.CUDA_SUCCESS, 5

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, int]:
        return Status.CUDA_SUCCESS, 6


@pytest.fixture(name="driver")
def driver_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launch, "driver", lambda: fake)
    return fake


@pytest.fixture(name="compiled")
def compiled_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Replace the compiler by one that accepts everything; return the list of its sources."""
    sources: list[Source] = []

    def fake(source: Source, arch: str) -> Cubin:
        sources.append(source)
        return cubin(source, b"compiled ")

    monkeypatch.setattr(compiling, "compile_source", fake)
    return sources


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ToolchainMissing("NVRTC cannot be loaded", "the wheels", "pip install '.[gpu]'")

    monkeypatch.setattr(compiling, "compile_source", missing)
