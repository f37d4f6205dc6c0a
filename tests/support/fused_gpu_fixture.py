"""Kernels of every family, store and split of K that takes an epilogue, for tests on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.kernels.epilogue import Epilogue  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402

CONFIGS: dict[str, KernelConfig] = {
    "wgmma_tma": Sm90WgmmaConfig(128, 128, stages=4, consumers=2),
    "wgmma_tma_pdl": Sm90WgmmaConfig(64, 64, stages=6, pdl=True),
    "wgmma_narrow_direct": Sm90WgmmaConfig(64, 16, 128, store="direct"),
    "wgmma_direct_pdl": Sm90WgmmaConfig(128, 96, stages=3, consumers=2, store="direct", pdl=True),
    "wgmma_width_8": Sm90WgmmaConfig(64, 8, 128, stages=4),
    "wgmma_odd_blocks": Sm90WgmmaConfig(64, 176, stages=4),
    "wgmma_wide": Sm90WgmmaConfig(128, 256, stages=3, consumers=2),
    "wgmma_two_blocks_of_rows": Sm90WgmmaConfig(256, 128, stages=3, consumers=2, l2="stream_c"),
    "wgmma_three_consumers": Sm90WgmmaConfig(192, 128, stages=4, consumers=3),
    "wgmma_two_ctas": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2),
    "wgmma_split2": Sm90WgmmaConfig(128, 128, stages=3, consumers=2, split_k=2, store="direct"),
    "wgmma_split3": Sm90WgmmaConfig(64, 64, stages=4, split_k=3, store="direct"),
    "wgmma_split16_pdl": Sm90WgmmaConfig(64, 32, stages=3, split_k=16, store="direct", pdl=True),
    "wgmma_split_cluster": Sm90WgmmaConfig(64, 64, stages=3, cluster_m=2, split_k=2, store="direct"),
    "wgmma_workspace": Sm90WgmmaConfig(64, 64, stages=6, split_k=4, store="direct", split_kind="workspace"),
    "wgmma_workspace_2x1_pdl": Sm90WgmmaConfig(
        128, 128, stages=5, consumers=2, cluster_m=2, split_k=3, store="direct", pdl=True, split_kind="workspace"
    ),
    "wgmma_cluster_2x2": Sm90WgmmaConfig(128, 64, stages=4, consumers=2, cluster_m=2, cluster_n=2, group=3),
    "wgmma_persistent": Sm90WgmmaConfig(128, 256, stages=3, consumers=2, persistent=True, raster="n"),
    "wgmma_pingpong": Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True),
    "wgmma_stagger": Sm90WgmmaConfig(256, 128, stages=4, consumers=2, schedule="stagger", persistent=True),
    "wgmma_shift": Sm90WgmmaConfig(128, 96, stages=4, consumers=2, shift=True),
    "wgmma_shift_split": Sm90WgmmaConfig(64, 64, stages=4, cluster_n=2, split_k=2, store="direct", shift=True),
    "wgmma_shift_workspace": Sm90WgmmaConfig(
        64, 80, stages=4, split_k=3, store="direct", split_kind="workspace", shift=True
    ),
    "wgmma_few_rows": Sm90WgmmaConfig(64, 32, 128, stages=9, a_rows=16),
    "wgmma_few_rows_split": Sm90WgmmaConfig(64, 48, stages=6, split_k=3, store="direct", a_rows=40),
    "mma_tile": Sm80MmaConfig(64, 64),
    "mma_warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8, pdl=True),
    "mma_split": Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4),
    "mma_scalar": Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1),
    "pipelined_tile": Sm80PipelinedConfig(128, 128),
    "pipelined_wide_warps": Sm80PipelinedConfig(32, 192, 32, 4, 1, 2),
    "pipelined_walk_pdl": Sm80PipelinedConfig(64, 96, 32, 4, persistent=True, pdl=True),
    "pipelined_split": Sm80PipelinedConfig(64, 64, 32, 4, split_k=4),
    "pipelined_scalar": Sm80PipelinedConfig(64, 64, 64, 3, vec=1),
    "direct_one_warp": Sm80DirectConfig(16, 8),
    "direct_wide": Sm80DirectConfig(64, 64, 2, 2, 1, 2),
    "direct_warps_over_k": Sm80DirectConfig(16, 16, 1, 1, 8, 4),
    "direct_uneven_pdl": Sm80DirectConfig(32, 32, 1, 2, 3, 3, pdl=True),
    "direct_early": Sm80DirectConfig(16, 16, 1, 1, 8, 4, pdl=True, early=True),
    "gemv_registers": Sm80GemvConfig(8, 64, 1, 8, 2),
    "gemv_shared": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "gemv_split": Sm80GemvConfig(16, 64, 1, 4, 2, split_k=4),
    "gemv_walk": Sm80GemvConfig(16, 64, 1, 4, 2, persistent=True),
    "gemv_walk_kept_pdl": Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True, l2="stream_b", kept_k=4096, pdl=True),
    "gemv_walk_shared": Sm80GemvConfig(8, 64, 1, 8, 2, "shared", persistent=True),
}
#: Kernels of the transpose, which have a stacked gate only.
SWAPPED: dict[str, Sm90WgmmaConfig] = {
    "one_consumer": Sm90WgmmaConfig(16, 64, 64, 6, swap=True),
    "two_consumers": Sm90WgmmaConfig(64, 128, 64, 6, 2, swap=True),
    "two_blocks_each": Sm90WgmmaConfig(48, 256, 64, 4, 2, swap=True, l2="stream_b"),
    "three_consumers": Sm90WgmmaConfig(112, 192, 64, 4, 3, swap=True, l2="stream_c"),
    "widest": Sm90WgmmaConfig(256, 128, 64, 4, 2, swap=True),
    "deep": Sm90WgmmaConfig(24, 64, 128, 4, swap=True, pdl=True),
    "two_ctas": Sm90WgmmaConfig(32, 64, 64, 4, swap=True, min_blocks=2),
    "early": Sm90WgmmaConfig(96, 128, 64, 6, 2, swap=True, pdl=True, early=True, l2="stream_bc"),
    "stagger": Sm90WgmmaConfig(80, 128, 64, 6, 2, "stagger", swap=True, persistent=True),
    "pingpong": Sm90WgmmaConfig(128, 128, 64, 6, 2, "pingpong", swap=True, persistent=True, raster="n", pdl=True),
    "persistent": Sm90WgmmaConfig(64, 128, 64, 6, 2, swap=True, persistent=True, ctas=128),
    "weights_in_two_parts": Sm90WgmmaConfig(48, 128, 64, 6, 2, cluster_m=2, swap=True, l2="stream_a"),
    "weights_in_four_parts": Sm90WgmmaConfig(16, 64, 64, 6, cluster_m=4, swap=True),
    "tokens_in_two_parts": Sm90WgmmaConfig(64, 128, 64, 6, 2, cluster_n=2, swap=True, pdl=True),
    "both_in_parts": Sm90WgmmaConfig(64, 128, 64, 4, 2, cluster_m=2, cluster_n=2, swap=True),
    "pingpong_in_parts": Sm90WgmmaConfig(192, 64, 64, 6, 2, "pingpong", 2, 1, persistent=True, swap=True),
    "shifted": Sm90WgmmaConfig(96, 128, 64, 6, 2, swap=True, shift=True),
    "shifted_in_parts": Sm90WgmmaConfig(64, 64, 64, 4, cluster_m=2, cluster_n=2, swap=True, shift=True),
}


@pytest.fixture(name="capable", autouse=True)
def capable_fixture() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("these kernels are Hopper's")
    torch.cuda.init()


SWIGLU, GEGLU = Epilogue(False, "silu", gated=True), Epilogue(True, "gelu", gated=True)


def layer(dtype: Any = torch.float16) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    shapes = ((256, 1024), (512, 1024), (512,), (256, 512))
    x, w, bias, residual = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    return x.to(dtype), (w / 32).to(dtype), bias.to(dtype), residual.to(dtype)
