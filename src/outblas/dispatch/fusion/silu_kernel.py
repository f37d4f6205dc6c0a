"""SiLU(gate) * up of the halves of a matrix, as a kernel of Triton, which comes with torch for CUDA."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

#: Outputs of a program, at most and at least, and of a thread: 16 bytes.
_MOST, _LEAST, _OF_THREAD = 1024, 256, 8
#: Bytes; Triton compiles another kernel for a pointer that is no multiple.
_ALIGNED = 16
#: Device, type, outputs of a row, and whether either pointer is aligned -> the kernel that Triton compiled.
_compiled: dict[tuple[int, torch.dtype, int, bool, bool], Any] = {}
#: Whether such a kernel takes all arguments. Before Triton 3.3 it takes those alone that are no constants.
_TAKES_ALL = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@triton.jit
def _silu_times(y, out, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    gate = tl.load(y + row * 2 * half + column, mask=inside).to(tl.float32)
    up = tl.load(y + row * 2 * half + half + column, mask=inside).to(tl.float32)
    tl.store(out + row * half + column, gate / (1 + tl.exp(-gate)) * up, mask=inside)


def launch(y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``silu(y[:, :H]) * y[:, H:]``, (M, H), on the current stream.

    Args:
        y: (M, 2H), contiguous, fp16 or bf16, on CUDA; M at least 1.
        out: contiguous tensor for the result; None: a new one.
    """
    device = y.device.index
    if device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return launch(y, out)
    rows, half = y.shape[0], y.shape[1] // 2
    out = y.new_empty((rows, half)) if out is None else out
    block = block_of(half)
    grid = (rows, triton.cdiv(half, block), 1)
    # Triton compiles a kernel for each of these, and takes long to find it. A prefill without graphs may wait for that.
    key = device, y.dtype, half, y.data_ptr() % _ALIGNED == 0, out.data_ptr() % _ALIGNED == 0
    ready = _compiled.get(key) if _TAKES_ALL else None
    if ready is None:
        warps = block // (32 * _OF_THREAD)
        _compiled[key] = _silu_times[grid](y, out, half, BLOCK=block, num_warps=warps)
    else:
        ready[grid](y, out, half, block)
    return out


@functools.cache
def block_of(half: int) -> int:
    """Return the outputs of a program: a power of two that divides a row, where one of 256 or more does.

    In Qwen2.5 7B a row has 18,944. With blocks of 1,024 half of the last one would idle: 7% of the time.
    """
    block = math.gcd(half, _MOST)
    return block if block >= _LEAST else _MOST
