"""A small model under torch.compile: alone, with ``outblas.enable()``, and with ``outblas.optimize()`` as well.

    pip install '.[gpu]'
    python examples/torch_compile.py

On a CPU it runs a tiny model. OutBLAS then says why it serves nothing, and the times mean nothing.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import outblas


class Block(nn.Module):
    """The MLP of a Llama layer, with a residual: x (M, hidden) -> (M, hidden)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def timed(model: nn.Module, x: torch.Tensor, calls: int = 50) -> tuple[torch.Tensor, float]:
    """Compile a model afresh; return its output, and the microseconds of a call in the fastest of five series."""
    torch.compiler.reset()
    compiled = torch.compile(model)
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    fastest = float("inf")
    with torch.inference_mode():
        y = compiled(x)  # compiles, and loads kernels
        for _ in range(5):
            wait()
            begin = time.perf_counter()
            for _ in range(calls):
                y = compiled(x)
            wait()
            fastest = min(fastest, (time.perf_counter() - begin) / calls * 1e6)
    return y, fastest


def main() -> None:
    on_gpu = torch.cuda.is_available()
    rows, hidden, inner, layers = (8, 4096, 14336, 4) if on_gpu else (8, 64, 128, 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden, inner) for _ in range(layers))).eval()
    model = model.to("cuda" if on_gpu else "cpu", torch.bfloat16)
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda" if on_gpu else "cpu")

    expected, us = timed(model, x)
    print(f"torch.compile:                        {us:8.1f} us")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outblas.enable()  # before the first compiled call: OutBLAS's products enter the graph
    for warning in caught:
        print(f"  {warning.message}")
    found, us = timed(model, x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # another order of sums in bf16
    print(f"torch.compile + enable():             {us:8.1f} us, the results agree")
    print(f"  products in the graph that OutBLAS computes: {outblas.status()['torch']['compiled']}")
    outblas.optimize(model)  # for calls that torch.compile does not trace; compiled ones fuse in their own graph
    found, us = timed(model, x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    print(f"torch.compile + enable() + optimize(): {us:7.1f} us, the results agree")


if __name__ == "__main__":
    main()
