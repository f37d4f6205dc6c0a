"""The record of knobs of ``sm90_oddrows_gemm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outblas.core.config import KernelConfig


@dataclass(frozen=True, order=True)
class Sm90OddrowsConfig(KernelConfig):
    """Knobs of ``sm90_oddrows_gemm``: TMA and wgmma for rows of any length.

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: rows of a C tile, elements: 64, 128 or 256.
        bn: columns of a C tile, elements: 64, 128, 192 or 256.
        bk: depth of one pipeline stage, elements of K: 64 or 128.
        stages: pipeline depth, 2 to 12.
        consumers: warpgroups that issue wgmma, 1 or 2; they share a tile.
        split_k: CTAs that share one tile's K, 1 to 32; the last to finish sums their parts from a workspace.
        group: tile rows of a band; consecutive CTAs work on one band, so that they share operands in L2.
        a_rows: rows of A in a stage, fewer than wgmma's 64, a multiple of 8; 0: all. For problems with at most this M.
        min_blocks: CTAs per SM for which registers and shared memory must have room, 1 to 4.
        pdl: launch option, programmatic dependent launch.
        early: needs pdl; the first loads of B do not wait for the predecessor.
    """

    family: ClassVar[str] = "sm90_oddrows_gemm"
    bm: int
    bn: int
    bk: int = 64
    stages: int = 4
    consumers: int = 1
    split_k: int = 1
    group: int = 8
    a_rows: int = 0
    min_blocks: int = 1
    pdl: bool = False
    early: bool = False

    @property
    def loaded_rows(self) -> int:
        """Return the rows of A in a stage."""
        return self.a_rows or self.bm

    @property
    def threads(self) -> int:
        """Return the number of threads of a CTA: the consumers' and the producer's."""
        return 128 * self.consumers + (32 if self.consumers == 1 else 128)
