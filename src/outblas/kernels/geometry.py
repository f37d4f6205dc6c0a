"""What follows from a (problem, config): constants of the kernel, threads, shared memory, grid.

The device code computes the same figures from the same constants; tests hold the two together. Each kernel family says
its own; what holds for all of them is here.
"""

from __future__ import annotations

import functools
import math

from outblas.core.config import KernelConfig
from outblas.core.problem import Acc, Dtype, Layout, Problem
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM, SM_THREADS, SMEM_LIMIT, SMEM_UNIT, Geometry, ceil_div


def geometry(problem: Problem, config: KernelConfig) -> Geometry:
    """Geometry of ``config`` for the problem's layout, dtype and accumulator; extents do not matter."""
    return _geometry(problem.layout, problem.dtype, problem.acc, config)


@functools.lru_cache(maxsize=16384)  # of every kernel of a search over many problems: legality asks for it each time
def _geometry(layout: Layout, dtype: Dtype, acc: Acc, config: KernelConfig) -> Geometry:
    return FAMILIES[config.family].geometry(Problem(1, 1, 1, layout, dtype, acc), config)


def grid(problem: Problem, config: KernelConfig, sms: int) -> tuple[int, int, int]:
    """CTAs to launch along x, y and z (scheduler/raster.cuh has what they mean)."""
    return FAMILIES[config.family].grid(problem, config, sms)


def launch_smem(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Dynamic shared memory per CTA that a launch on a GPU of ``sms`` SMs asks for, bytes: what the kernel uses.

    With ``even`` so much more that no more CTAs fit on an SM than it has where all are spread evenly: under PDL they
    arrive while their predecessors still run and stack up where there is room. Nothing is added where that would be
    less than what the kernel uses. Source: what was measured on an H200, docs/journal/pdl-and-early.md, entry 0028.
    """
    own = geometry(problem, config).smem_bytes
    if not config.even:
        return own
    padded = (SM_SMEM // _even_share(problem, config, sms) - CTA_SMEM) // SMEM_UNIT * SMEM_UNIT
    return max(own, min(padded, SMEM_LIMIT))


def may_exceed_even_share(problem: Problem, config: KernelConfig, sms: int) -> bool:
    """Whether an SM of sm_90 has room, by threads and by the shared memory that the kernel uses, for more CTAs than
    an even distribution over ``sms`` SMs gives it: elsewhere ``even`` changes nothing."""
    shape = geometry(problem, config)
    room = min(SM_SMEM // (shape.smem_bytes + CTA_SMEM), SM_THREADS // shape.threads)
    return room > _even_share(problem, config, sms)


def _even_share(problem: Problem, config: KernelConfig, sms: int) -> int:
    """CTAs of the busiest SM where all are spread evenly."""
    return ceil_div(math.prod(grid(problem, config, sms)), sms)


def workspace_bytes(problem: Problem, config: KernelConfig) -> int:
    """Global memory that a call of the kernel needs beside its operands: counters (the first COUNTERS_BYTES), and
    every CTA's tile in fp32 (epilogue/workspace_reduce.cuh); 0 for kernels that need none."""
    return FAMILIES[config.family].workspace_bytes(problem, config)


def k_tiles(problem: Problem, config: KernelConfig) -> int:
    """Stages' worth of K."""
    return FAMILIES[config.family].k_tiles(problem, config)
