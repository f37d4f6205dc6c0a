"""A stand-in for a GPU's grouped kernels: they compute with torch on the CPU, and say what was asked of them."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outblas.dispatch.grouped import grouped_product, moe_layer
from outblas.dispatch.grouped.grouped_state import GroupedState


class RowKernels:
    """Stand in for :class:`outblas.runtime.moe_rows.MoeRows`; ``dependent`` learns it of each launch."""

    def __init__(self, dependent: list[bool]) -> None:
        self.dependent = dependent

    def route(self, experts: Any, ends: Any, tokens: Any, places: Any, stream: int) -> None:
        flat = experts.flatten().long()
        order = torch.sort(flat, stable=True).indices
        ends.copy_(torch.bincount(flat, minlength=len(ends)).cumsum(0))
        tokens.copy_(order // experts.shape[1])
        places[order] = torch.arange(len(flat), dtype=torch.int32)

    def gather(self, x: Any, tokens: Any, rows: Any, stream: int, dependent: bool) -> None:
        self.dependent.append(dependent)
        rows.copy_(x[tokens.long()])

    def combine(self, y: Any, places: Any, scores: Any, out: Any, stream: int, dependent: bool) -> None:
        self.dependent.append(dependent)
        each = y[places.long()].view(*scores.shape, -1).float() * scores.float().unsqueeze(-1)
        out.copy_(each.sum(1))


class StandIn(GroupedState):
    """Kernels of the CPU.

    Attributes:
        asked: (problem, must, waits) of each kernel, in order.
        dependent: whether each launch, that of rows too, may begin before the kernel before it ends.
        lacking: kinds without a kernel: True, products with a gate; False, those without.
        with_rows: whether the kernels of rows are loaded.
        torch_is_faster: no kernel is chosen unless one must be.
    """

    def __init__(self) -> None:
        super().__init__("sm_90a")
        self.asked: list[tuple[Any, bool, bool]] = []
        self.dependent: list[bool] = []
        self.lacking: set[bool] = set()
        self.with_rows, self.torch_is_faster = True, False

    def choose(self, problem: Any, rows: int, must: bool) -> Any:
        return SimpleNamespace(must=must) if must or not self.torch_is_faster else None

    def kernel(self, problem: Any, config: Any, wait: bool, capturing: bool) -> Any:
        self.asked.append((problem, config.must, wait))
        return None if problem.gated in self.lacking else SimpleNamespace(problem=problem)

    def run(
        self, kernel: Any, a: Any, w: Any, ends: Any, c: Any, bias: Any, stream: int, dependent: bool = False
    ) -> None:
        self.dependent.append(dependent)
        w = w.transpose(-2, -1) if kernel.problem.layout == "TN" else w
        for group, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            y = a[begin:end].float() @ w[group].float()  # in fp32, which no override of half precision sees
            y = y if bias is None else y + bias[group]
            if kernel.problem.gated:
                gate, up = y.chunk(2, dim=-1)
                y = torch.nn.functional.silu(gate) * up
            c[begin:end] = y

    def rows(self, dtype: str, experts: str, scores: str, may_load: bool) -> Any:
        return RowKernels(self.dependent) if self.with_rows else None


def grouped_stand_in(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> StandIn:
    """Let the CPU have grouped kernels for the length of a test; return them.

    Args:
        modules: further modules that ask for the kernels of a device.
    """
    state = StandIn()
    for module in (grouped_product, moe_layer, *modules):
        monkeypatch.setattr(module, "grouped_state", lambda index: state)
    monkeypatch.setattr(grouped_product.device_registry, "DEVICE_TYPE", "cpu")
    device = SimpleNamespace(make_current=lambda index: contextlib.nullcontext())
    monkeypatch.setattr(grouped_product.device_registry, "device_state", lambda index: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return state
