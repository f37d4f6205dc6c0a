"""Kernels that a pack has or lacks, and cubins made up for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from outblas.cli.checks import health
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import Source, make_source
from outblas.runtime import packaged_cubins
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
