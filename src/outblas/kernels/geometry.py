"""Quantities that follow from a (problem, config): kernel constants, threads, shared memory, grid.

The device code computes the same values from the same constants, and tests compare both. Each family defines its own;
rules common to all are here.
"""

from __future__ import annotations

import functools
import math

from outblas.core.config import KernelConfig
from outblas.core.problem import Acc, Dtype, Layout, Problem, any_of_kind
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM, SM_THREADS, SMEM_LIMIT, SMEM_UNIT, Geometry, ceil_div


def geometry(problem: Problem, config: KernelConfig) -> Geometry:
    """Return the geometry of a config: threads, shared memory, cluster, accumulators and constants.

    It depends on the problem's layout, dtype and accumulator, not on its extents. It does not check legality.
    """
    return _geometry(problem.layout, problem.dtype, problem.acc, config)


@functools.lru_cache(maxsize=16384)  # large enough for a search: legality asks for each kernel on each problem
def _geometry(layout: Layout, dtype: Dtype, acc: Acc, config: KernelConfig) -> Geometry:
    return FAMILIES[config.family].geometry(any_of_kind(layout, dtype, acc), config)


def grid(problem: Problem, config: KernelConfig, sms: int) -> tuple[int, int, int]:
    """Return the number of CTAs along x, y and z. All CTAs of a cluster count, and a cluster lies along x.

    For tiled kernels, x and z together walk over tiles of one extent in bands, and y over those of the other. A
    persistent kernel has a grid of (CTAs, 1, 1). The parts of a workspace multiply z. Example: 64 x 64 tiles of
    ``sm80_mma_gemm`` give (8, 64, 8).

    Args:
        sms: number of SMs; only persistent kernels depend on it.
    """
    return FAMILIES[config.family].grid(problem, config, sms)


def launch_smem(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Return the dynamic shared memory per CTA that a launch requests, bytes.

    Without ``even``, it is the amount that the kernel uses. With ``even``, it may be more: so much that an SM holds no
    more CTAs than an even distribution gives it. Otherwise, under PDL, CTAs that arrive while their predecessors run
    pile up on the SMs with room. Source: measurements on an H200, docs/journal/kernels.md, entry 0028.

    With ``even``, the amount is at most 232448, or what the kernel uses if that is more. It is 232448 if each SM gets
    at most one CTA.
    """
    own = geometry(problem, config).smem_bytes
    if not config.even:
        return own
    padded = (SM_SMEM // _even_share(problem, config, sms) - CTA_SMEM) // SMEM_UNIT * SMEM_UNIT
    return max(own, min(padded, SMEM_LIMIT))


def may_exceed_even_share(problem: Problem, config: KernelConfig, sms: int) -> bool:
    """Return whether an SM of sm_90 has room for more CTAs than an even distribution over ``sms`` SMs gives it.

    Room means threads and the shared memory that the kernel uses. The even share is the number of CTAs of the grid
    divided by ``sms``, rounded up. If the result is False, ``even`` changes nothing. The config's own ``even`` has no
    effect.
    """
    shape = geometry(problem, config)
    room = min(SM_SMEM // (shape.smem_bytes + CTA_SMEM), SM_THREADS // shape.threads)
    return room > _even_share(problem, config, sms)


def _even_share(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Return the CTAs of the busiest SM if all CTAs are spread evenly."""
    return ceil_div(math.prod(grid(problem, config, sms)), sms)


def workspace_bytes(problem: Problem, config: KernelConfig) -> int:
    """Return the size, bytes, of the workspace that a call needs; 0 if none.

    ``sm90_wgmma_gemm`` needs one with ``split_kind="workspace"``, ``sm80_pipelined_gemm`` with ``split_k`` above 1. It
    holds 65536 bytes of counters, then the tile of every CTA in fp32. Example: 4 tiles of 64 x 64 with ``split_k=2``
    need 65536 + 4 * 2 * 64 * 64 * 4 = 196608 bytes.
    """
    return FAMILIES[config.family].workspace_bytes(problem, config)


def k_tiles(problem: Problem, config: KernelConfig) -> int:
    """Return the number of pipeline stages into which K is divided: K / ``bk`` rounded up, before K is split.

    For ``sm80_gemv_mma``, the divisor is a step of K: 64 for layout ``TN``, 32 for ``NN``.
    """
    return FAMILIES[config.family].k_tiles(problem, config)
