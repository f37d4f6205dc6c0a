"""The knobs of ``sm80_pipelined_gemm``, and the kernels of its pool."""

from __future__ import annotations

from collections.abc import Iterator
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


#: (bm, bn, wm, wn) of large tiles: warps of 64 x 64, 64 x 48, 64 x 32, 48 x 64 and 32 x 80.
_LARGE = (
    *((256, 128, 4, 2), (128, 256, 2, 4), (256, 64, 4, 1), (64, 256, 1, 4), (128, 128, 2, 2), (128, 128, 2, 4)),
    *((192, 128, 4, 2), (128, 192, 2, 4), (128, 160, 4, 2), (256, 96, 4, 2), (128, 96, 2, 2), (96, 128, 2, 2)),
)
#: Tiles of medium size.
_MEDIUM = (
    *((128, 64, 2, 2), (64, 128, 2, 2), (64, 96, 2, 2), (96, 64, 2, 2), (64, 160, 2, 2), (64, 192, 2, 2)),
    *((64, 64, 2, 2), (128, 32, 4, 1), (32, 128, 1, 4), (96, 96, 2, 2)),
)
#: Tiles for few rows or columns.
_SMALL = ((64, 32, 2, 1), (32, 64, 1, 2), (32, 32, 2, 2), (16, 128, 1, 4), (16, 64, 1, 4), (16, 256, 1, 8))
#: (bk, stages) of rings for tiles of each size.
_LARGE_RINGS = ((32, 3), (32, 4), (32, 5), (64, 2), (64, 3), (16, 6))
_MEDIUM_RINGS = ((32, 4), (32, 6), (64, 3), (64, 4))
_SMALL_RINGS = ((32, 4), (32, 6), (64, 3), (64, 4))
#: Parts of K that a workspace gets.
_SPLITS = (2, 3, 4, 6, 8, 12, 16)


def plain_kernels() -> Iterator[Sm80PipelinedConfig]:
    """Yield a kernel for each tile and ring, with one tile per CTA and K in one part."""
    for tiles, rings in ((_LARGE, _LARGE_RINGS), (_MEDIUM, _MEDIUM_RINGS), (_SMALL, _SMALL_RINGS)):
        for bm, bn, wm, wn in tiles:
            for bk, stages in rings:
                yield Sm80PipelinedConfig(bm, bn, bk, stages, wm, wn)


def persistent_kernels() -> Iterator[Sm80PipelinedConfig]:
    """Yield kernels whose CTAs walk over tiles: one per SM for large tiles, two for medium ones."""
    for bm, bn, wm, wn in _LARGE:
        for bk, stages in ((32, 3), (32, 4), (64, 2)):
            yield Sm80PipelinedConfig(bm, bn, bk, stages, wm, wn, persistent=True)
    for bm, bn, wm, wn in (*_MEDIUM, (128, 128, 2, 2), (128, 96, 2, 2)):
        yield Sm80PipelinedConfig(bm, bn, 32, 3, wm, wn, persistent=True, min_blocks=2)


def split_kernels() -> Iterator[Sm80PipelinedConfig]:
    """Yield kernels that split K: the fewer elements a tile has, the more parts."""
    for bm, bn, wm, wn in ((128, 128, 2, 2), (128, 256, 2, 4), (256, 128, 4, 2), (128, 192, 2, 4)):
        for split in _SPLITS[:4]:
            yield Sm80PipelinedConfig(bm, bn, 32, 4, wm, wn, split)
    for bm, bn, wm, wn in ((128, 64, 2, 2), (64, 128, 2, 2), (64, 64, 2, 2), (64, 96, 2, 2)):
        for split in _SPLITS:
            yield Sm80PipelinedConfig(bm, bn, 32, 4, wm, wn, split)
            yield Sm80PipelinedConfig(bm, bn, 64, 3, wm, wn, split)
    for bm, bn, wm, wn in _SMALL:
        bk, stages = (64, 4) if bn < 256 else (32, 5)  # the wider one fits into 99 KiB
        for split in _SPLITS:
            yield Sm80PipelinedConfig(bm, bn, bk, stages, wm, wn, split)
