"""The pool: a broad set of kernels, launch options off, from which a catalogue is chosen by measurement.

It contains the kernels that were expected to be best somewhere; outblas.kernels.legality decides where each is legal.
"""

from __future__ import annotations

import functools

from outblas.core.config import KernelConfig
from outblas.kernels.families.registry import FAMILIES


@functools.cache
def pool() -> tuple[KernelConfig, ...]:
    """Return all kernels of the pool in a fixed order, without duplicates, with ``pdl`` False.

    The families follow each other by :attr:`Family.pool_place`: ``sm80_mma_gemm``, ``sm80_direct_gemm``,
    ``sm90_wgmma_gemm``, ``sm80_gemv_mma``. Every call returns the same tuple.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.pool_place)
    return tuple(dict.fromkeys(config for family in families for config in family.pool()))
