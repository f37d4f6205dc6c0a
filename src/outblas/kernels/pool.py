"""The pool: a broad set of kernels, launch options off, from which a catalogue is chosen by measurement.

It contains the kernels that were expected to be best somewhere; outblas.kernels.legality decides where each is legal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from outblas.core.config import KernelConfig
from outblas.kernels.families.family import Family
from outblas.kernels.families.registry import FAMILIES


@functools.cache
def pool() -> tuple[KernelConfig, ...]:
    """Return all kernels of the pool in a fixed order, without duplicates, with ``pdl`` False.

    The families follow each other by :attr:`Family.pool_place`: ``sm80_mma_gemm``, ``sm80_direct_gemm``,
    ``sm90_wgmma_gemm``, ``sm80_gemv_mma``. Families that are only for GPUs without wgmma, or for unaligned rows, are
    left out. Every call returns the same tuple.
    """
    return _kernels(pool_families())


@functools.cache
def unaligned_pool() -> tuple[KernelConfig, ...]:
    """Return all kernels of the families for rows that are not multiples of 16 bytes, as :func:`pool`."""
    return _kernels(family for family in FAMILIES.values() if family.for_unaligned_rows)


@functools.cache
def mma_pool() -> tuple[KernelConfig, ...]:
    """Return all kernels of the pool for GPUs without wgmma, as :func:`pool`: those of every family of mma.sync.

    ``sm80_pipelined_gemm`` comes last.
    """
    return _kernels(family for family in FAMILIES.values() if family.instructions == "mma")


def pool_families() -> list[Family[Any]]:
    """Return the families of :func:`pool`: those that serve aligned rows on the reference GPU."""
    return [f for f in FAMILIES.values() if not (f.without_wgmma or f.for_unaligned_rows)]


def _kernels(families: Iterable[Family[Any]]) -> tuple[KernelConfig, ...]:
    """Return the families' kernels, without duplicates, family after family by their place in the pool."""
    ordered = sorted(families, key=lambda family: family.pool_place)
    return tuple(dict.fromkeys(config for family in ordered for config in family.pool()))
