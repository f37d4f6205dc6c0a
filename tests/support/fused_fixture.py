"""Kernels to be fused; and fused ones of the device of :mod:`support.served_fixture`, computed on the CPU: in fp32,
with one rounding in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, fused, fused_layer
from outblas.judge.fused_gates import apply_activation
from outblas.kernels.epilogue import Epilogue
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.runtime.fused_launch import Extra
from support.served_fixture import Served

torch = pytest.importorskip("torch")

P = Problem(1024, 1024, 4096)
FEW = Problem(8, 4096, 4096)
#: Every family, store and way to split K.
KERNELS: dict[str, tuple[Problem, KernelConfig]] = {
    "wgmma_tma": (P, Sm90WgmmaConfig(128, 128, stages=4, consumers=2, pdl=True)),
    "wgmma_direct": (P, Sm90WgmmaConfig(64, 32, 128, store="direct")),
    "wgmma_wide": (P, Sm90WgmmaConfig(128, 256, stages=3, consumers=2, cluster_n=2, persistent=True, raster="n")),
    "wgmma_pingpong": (P, Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True)),
    "wgmma_three": (P, Sm90WgmmaConfig(192, 128, stages=4, consumers=3)),
    "wgmma_odd_blocks": (P, Sm90WgmmaConfig(64, 176, stages=4)),
    "wgmma_cluster": (P, Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct")),
    "wgmma_workspace": (P, Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct", split_kind="workspace")),
    "mma": (P, Sm80MmaConfig(64, 64)),
    "mma_split": (P, Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4)),
    "mma_scalar": (P, Sm80MmaConfig(64, 64, wn=4, vec=1)),
    "pipelined": (P, Sm80PipelinedConfig(128, 128)),
    "pipelined_split": (P, Sm80PipelinedConfig(64, 64, 32, 4, split_k=4)),
    "pipelined_walk": (P, Sm80PipelinedConfig(256, 128, 32, 3, 4, 2, persistent=True)),
    "direct": (P, Sm80DirectConfig(64, 64, 2, 2, unroll=2)),
    "direct_warps": (P, Sm80DirectConfig(32, 16, 1, 1, 8, 3, pdl=True, early=True)),
    "gemv": (FEW, Sm80GemvConfig(8, 64, 1, 4, 2)),
    "gemv_split": (FEW, Sm80GemvConfig(8, 64, 1, 8, 2, "shared", 8, pdl=True)),
    "gemv_walk": (FEW, Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True, l2="stream_b", kept_k=4096)),
}
#: Every second one, for variants that need not be compiled with all.
SECOND_KERNELS = frozenset([*KERNELS][1::2])


class OnTheHost:
    """Stands in for a kernel: ``compute(product in fp64, bias, residual)`` gives C's values."""

    def __init__(self, epilogue: Epilogue, compute: Callable[[Any, Any, Any], Any] | None = None) -> None:
        self.epilogue = epilogue
        self._compute = compute or self._right

    def _right(self, sums: Any, bias: Any, residual: Any) -> Any:
        z = sums if bias is None else sums + bias.float()
        if self.epilogue.gated:
            return apply_activation(z[:, 0::2].float(), self.epilogue) * z[:, 1::2].float()
        y = apply_activation(z.float(), self.epilogue)
        return y if residual is None else y + residual.float()

    def bind(self, problem: Problem, operands: tuple[Any, Any, Any], extra: Extra, workspace: Any = None) -> Any:
        a, b, c = operands

        def call(stream: int) -> None:
            right = b.t() if problem.layout == "TN" else b
            sums = (a.double().unsqueeze(2) * right.double()).sum(1)  # by no product of torch's, which may be ours
            c.copy_(self._compute(sums.float(), *extra))

        call.release = lambda: None  # type: ignore[attr-defined]
        return call


@pytest.fixture(name="host")
def host_fixture(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[fused.FusedState]:
    """A device of the CPU whose fused kernels are :class:`OnTheHost`'s."""
    state = fused.FusedState(lambda problem, config, epilogue: None, lambda code, c, e: (OnTheHost(e), 0.0))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(fused, "_states", {None: state})
    monkeypatch.setattr(
        device_registry.devices[None], "make_current", lambda index: contextlib.nullcontext(), raising=False
    )
    monkeypatch.setattr(fused, "_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(fused_layer.FUSED_VARIABLE, raising=False)
    yield state
