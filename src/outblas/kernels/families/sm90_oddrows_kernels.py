"""The knobs of ``sm90_oddrows_gemm``, and the kernels of its pool."""

from __future__ import annotations

from collections.abc import Iterator
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


#: (bm, bn, consumers, bk, stages, CTAs per SM) of tiles from large to small.
_TILES = (
    *((128, 256, 2, 64, 3, 1), (128, 256, 2, 64, 4, 1), (256, 128, 2, 64, 4, 1), (128, 192, 2, 64, 4, 1)),
    *((128, 128, 2, 64, 4, 1), (128, 128, 2, 64, 6, 1), (128, 128, 2, 128, 3, 1), (64, 256, 1, 64, 4, 1)),
    *((64, 256, 1, 64, 5, 1), (64, 192, 1, 64, 6, 1), (128, 64, 2, 64, 6, 1), (128, 64, 2, 64, 8, 1)),
    *((64, 128, 1, 64, 4, 2), (64, 128, 1, 64, 8, 1), (64, 128, 1, 128, 4, 1), (64, 64, 1, 64, 6, 2)),
    *((64, 64, 1, 64, 4, 3), (64, 64, 1, 128, 6, 1), (64, 64, 1, 64, 12, 1), (64, 192, 1, 64, 3, 2)),
)
#: Tiles of which K is split, and parts of K.
_SPLIT_TILES = (
    *((128, 256, 2, 64, 4, 1), (128, 128, 2, 64, 6, 1), (64, 256, 1, 64, 5, 1), (64, 128, 1, 64, 4, 2)),
    *((64, 128, 1, 64, 8, 1), (64, 64, 1, 64, 4, 3), (64, 64, 1, 128, 6, 1)),
)
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 32)
#: Rows of A in a stage for small M, and (bn, bk, stages, CTAs per SM) of such tiles.
FEW_ROWS = (8, 16, 24, 32, 48)
_FEW_ROWS_RINGS = (
    *((64, 64, 12, 1), (64, 128, 8, 1), (128, 64, 8, 1), (128, 128, 5, 1), (256, 64, 5, 1)),
    *((64, 64, 5, 3), (64, 128, 3, 2), (128, 64, 4, 2)),
)


def plain_kernels() -> Iterator[Sm90OddrowsConfig]:
    """Yield a kernel for each tile and ring, with K in one part."""
    for bm, bn, consumers, bk, stages, blocks in _TILES:
        yield Sm90OddrowsConfig(bm, bn, bk, stages, consumers, min_blocks=blocks)


def split_kernels() -> Iterator[Sm90OddrowsConfig]:
    """Yield kernels that split K."""
    for bm, bn, consumers, bk, stages, blocks in _SPLIT_TILES:
        for split in _SPLITS:
            yield Sm90OddrowsConfig(bm, bn, bk, stages, consumers, split, min_blocks=blocks)


def few_rows_kernels() -> Iterator[Sm90OddrowsConfig]:
    """Yield kernels for M below 64, with K in one part and in several."""
    for rows in FEW_ROWS:
        for bn, bk, stages, blocks in _FEW_ROWS_RINGS:
            for split in (1, 2, 4, 8, 16, 32):
                yield Sm90OddrowsConfig(64, bn, bk, stages, 1, split, a_rows=rows, min_blocks=blocks)
