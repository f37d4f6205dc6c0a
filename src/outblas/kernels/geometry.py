"""Quantities that follow from a (problem, config): kernel constants, threads, shared memory, grid.

The device code computes the same values from the same constants, and tests compare both. Each family defines its own;
rules common to all are here.
"""

from __future__ import annotations

import functools
import math

from outblas.core.config import KernelConfig
from outblas.core.problem import Acc, Dtype, Layout, Problem
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM, SM_THREADS, SMEM_LIMIT, SMEM_UNIT, Geometry, ceil_div


def geometry(problem: Problem, config: KernelConfig) -> Geometry:
    """Return the geometry of a config. It depends on the problem's layout, dtype and accumulator, not on extents."""
    return _geometry(problem.layout, problem.dtype, problem.acc, config)


@functools.lru_cache(maxsize=16384)  # large enough for a search: legality asks for each kernel on each problem
def _geometry(layout: Layout, dtype: Dtype, acc: Acc, config: KernelConfig) -> Geometry:
    return FAMILIES[config.family].geometry(Problem(1, 1, 1, layout, dtype, acc), config)


def grid(problem: Problem, config: KernelConfig, sms: int) -> tuple[int, int, int]:
    """Return the number of CTAs along x, y and z (their meaning: scheduler/raster.cuh).

    Args:
        problem: the problem.
        config: the kernel.
        sms: number of SMs.
    """
    return FAMILIES[config.family].grid(problem, config, sms)


def launch_smem(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Return the dynamic shared memory per CTA that a launch requests, bytes.

    Without ``even``, it is the amount that the kernel uses. With ``even``, it may be more: so much that an SM holds no
    more CTAs than an even distribution gives it. Otherwise, under PDL, CTAs that arrive while their predecessors run
    pile up on the SMs with room. Source: measurements on an H200, docs/journal/pdl-and-early.md, entry 0028.

    Args:
        problem: the problem.
        config: the kernel.
        sms: number of SMs.
    """
    own = geometry(problem, config).smem_bytes
    if not config.even:
        return own
    padded = (SM_SMEM // _even_share(problem, config, sms) - CTA_SMEM) // SMEM_UNIT * SMEM_UNIT
    return max(own, min(padded, SMEM_LIMIT))


def may_exceed_even_share(problem: Problem, config: KernelConfig, sms: int) -> bool:
    """Return whether an SM of sm_90 has room for more CTAs than an even distribution over ``sms`` SMs gives it.

    Room means threads and the shared memory that the kernel uses. If False, ``even`` changes nothing.
    """
    shape = geometry(problem, config)
    room = min(SM_SMEM // (shape.smem_bytes + CTA_SMEM), SM_THREADS // shape.threads)
    return room > _even_share(problem, config, sms)


def _even_share(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Return the CTAs of the busiest SM if all CTAs are spread evenly."""
    return ceil_div(math.prod(grid(problem, config, sms)), sms)


def workspace_bytes(problem: Problem, config: KernelConfig) -> int:
    """Return the size, bytes, of the workspace that a call needs; 0 if none.

    It holds the counters (the first COUNTERS_BYTES), then every CTA's tile in fp32 (epilogue/workspace_reduce.cuh).
    """
    return FAMILIES[config.family].workspace_bytes(problem, config)


def k_tiles(problem: Problem, config: KernelConfig) -> int:
    """Return the number of pipeline stages into which K is divided."""
    return FAMILIES[config.family].k_tiles(problem, config)
