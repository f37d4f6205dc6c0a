"""The record of knobs of ``sm80_pipelined_gemm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outblas.core.config import KernelConfig


@dataclass(frozen=True, order=True)
class Sm80PipelinedConfig(KernelConfig):
    """Knobs of ``sm80_pipelined_gemm``: a ring of cp.async stages, ldmatrix ahead of mma.sync, 16-byte stores.

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: rows of a C tile, elements; a multiple of 16 ``wm``, up to 256.
        bn: columns of a C tile, elements; a multiple of 16 ``wn``, up to 256.
        bk: depth of one stage, elements of K: 16, 32 or 64.
        stages: depth of the cp.async ring, 2 to 6.
        wm: warps along M.
        wn: warps along N.
        split_k: CTAs that share one tile's K, 1 to 32; the last to finish sums their parts from a workspace.
        vec: elements per global load. 8, 4, 2: cp.async of 16, 8, 4 bytes. 1: predicated scalar loads, for rows of any
            alignment.
        group: tile rows of a band; consecutive CTAs work on one band, so that they share operands in L2.
        persistent: as many CTAs as are resident, each of which walks over tiles; the next tile is loaded while one is
            stored.
        min_blocks: CTAs per SM for which registers and shared memory must have room, 1 to 4.
        pdl: launch option, programmatic dependent launch (sm_90 and later).
        early: needs pdl; the first loads of B do not wait for the predecessor.
    """

    family: ClassVar[str] = "sm80_pipelined_gemm"
    bm: int
    bn: int
    bk: int = 32
    stages: int = 4
    wm: int = 2
    wn: int = 2
    split_k: int = 1
    vec: int = 8
    group: int = 8
    persistent: bool = False
    min_blocks: int = 1
    pdl: bool = False
    early: bool = False

    @property
    def threads(self) -> int:
        """Return the number of threads of a CTA: 32 for each of the ``wm * wn`` warps."""
        return 32 * self.wm * self.wn
