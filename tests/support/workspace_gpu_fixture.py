"""Problems and kernels that split K over a workspace, for tests on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402

BASE = Sm90WgmmaConfig(64, 64, 64, 8, split_k=4, store="direct", split_kind="workspace")
CONFIGS: dict[str, KernelConfig] = {
    "64x64_4": BASE,
    "64x64_4_2x1_pdl": replace(BASE, cluster_m=2, pdl=True),
    "64x128_12_1x2": replace(BASE, bn=128, cluster_n=2, split_k=12, raster="n"),
    "128x128_5_2x1": replace(BASE, bm=128, bn=128, stages=6, consumers=2, cluster_m=2, split_k=5, group=2),
    "128x256_2_pdl": replace(BASE, bm=128, bn=256, stages=4, consumers=2, split_k=2, pdl=True),
    "64x8_32": replace(BASE, bn=8, split_k=32),
    "pipelined_128x128_3": Sm80PipelinedConfig(128, 128, 32, 4, split_k=3),
    "pipelined_64x96_16_pdl": Sm80PipelinedConfig(64, 96, 32, 4, split_k=16, pdl=True),
}
WHOLE, RAGGED = Problem(256, 512, 12288), Problem(331, 648, 4104)
DEEP = Problem(64, 128, 16384)


@pytest.fixture(name="capable", autouse=True)
def capable_fixture() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("these kernels are Hopper's")
    torch.cuda.init()


def bits(c: Any) -> Any:
    return c.view(torch.int16).clone()


def operands(problem: Problem, seed: int = 0) -> tuple[Any, Any]:
    """(A, the transpose of a weight)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(problem.m, problem.k, device="cuda", generator=generator).half()
    return a, torch.randn(problem.b_shape, device="cuda", generator=generator).half().t()
