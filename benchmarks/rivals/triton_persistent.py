"""A persistent matrix product in Triton, of the kind that inference engines use for batch-invariant results.

Every program walks over tiles of one size and adds K in ascending steps, whatever M is. It serves
``benchmarks/batch_invariance.py`` as a rival. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Tile, depth of a step, tiles of a group, warps and stages, for all M.
BM, BN, BK, GROUP, WARPS, STAGES = 128, 128, 64, 8, 8, 3


@triton.jit  # type: ignore[misc]
def persistent_matmul(
    a, b, c, m, n, k, stride_am, stride_bk, stride_bn, stride_cm,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Compute C = A B, with rows of A and C without gaps and fp32 sums."""
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        first = tile // (GROUP * tiles_n) * GROUP
        size = min(tiles_m - first, GROUP)
        inside = tile % (GROUP * tiles_n)
        rows = ((first + inside % size) * BM + tl.arange(0, BM)).to(tl.int64)
        columns = (inside // size * BN + tl.arange(0, BN)).to(tl.int64)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(tl.cdiv(k, BK)):
            depth = step * BK + tl.arange(0, BK)
            left = (rows[:, None] < m) & (depth[None, :] < k)
            right = (depth[:, None] < k) & (columns[None, :] < n)
            x = tl.load(a + rows[:, None] * stride_am + depth[None, :], mask=left, other=0.0)
            y = tl.load(b + depth[:, None] * stride_bk + columns[None, :] * stride_bn, mask=right, other=0.0)
            sums = tl.dot(x, y, sums)
        written = (rows[:, None] < m) & (columns[None, :] < n)
        tl.store(c + rows[:, None] * stride_cm + columns[None, :], sums.to(c.dtype.element_ty), mask=written)


def multiply(a: Any, b: Any, out: Any = None) -> Any:
    """Return ``a @ b`` of (M, K) and (K, N) half-precision CUDA tensors by :func:`persistent_matmul`.

    Args:
        a: (M, K), rows without gaps.
        b: (K, N), any strides.
        out: (M, N), rows without gaps; None: a new tensor.
    """
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device) if out is None else out
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    tiles = triton.cdiv(m, BM) * triton.cdiv(n, BN)
    persistent_matmul[(min(programs, tiles),)](
        *(a, b, c, m, n, k, a.stride(0), b.stride(0), b.stride(1), c.stride(0)),
        min(programs, tiles), BM, BN, BK, GROUP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return c
