"""The kernels of ``sm90_oddrows_gemm`` that are tried, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm90_oddrows_config import Sm90OddrowsConfig
from outblas.kernels.geometry_terms import ceil_div

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
_FEW_ROWS = (8, 16, 24, 32, 48)
_FEW_ROWS_RINGS = (
    *((64, 64, 12, 1), (64, 128, 8, 1), (128, 64, 8, 1), (128, 128, 5, 1), (256, 64, 5, 1)),
    *((64, 64, 5, 3), (64, 128, 3, 2), (128, 64, 4, 2)),
)
#: CTAs per SM up to which a split of K is offered.
_CTAS_PER_SM = 4


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
    for rows in _FEW_ROWS:
        for bn, bk, stages, blocks in _FEW_ROWS_RINGS:
            for split in (1, 2, 4, 8, 16, 32):
                yield Sm90OddrowsConfig(64, bn, bk, stages, 1, split, a_rows=rows, min_blocks=blocks)


def pool() -> Iterator[Sm90OddrowsConfig]:
    """Yield the family's kernels, launch options off."""
    yield from plain_kernels()
    yield from split_kernels()
    yield from few_rows_kernels()


def candidates(problem: Problem, gpu: Gpu) -> Iterator[Sm90OddrowsConfig]:
    """Yield the kernels of the pool to try on a problem, each without PDL, then with it; some may be illegal.

    K is split only if the CTAs are then at most four per SM. A small M has the kernels that load as few rows as serve
    it, and no others.

    Args:
        problem: the problem.
        gpu: the GPU.
    """
    rows = next((rows for rows in _FEW_ROWS if rows >= problem.m), 0)
    for config in pool():
        tiles = ceil_div(problem.m, config.bm) * ceil_div(problem.n, config.bn)
        if config.a_rows == rows and (config.split_k == 1 or tiles * config.split_k <= _CTAS_PER_SM * gpu.sms):
            yield config
            yield replace(config, pdl=True)


def neighbours(c: Sm90OddrowsConfig) -> list[Iterator[Sm90OddrowsConfig]]:
    """Return ideas near a config: its ring, its tile, the number of its CTAs. Some configs may be illegal."""
    return [_other_rings(c), _other_tiles(c), _other_ctas(c)]


def _other_rings(c: Sm90OddrowsConfig) -> Iterator[Sm90OddrowsConfig]:
    yield replace(c, stages=c.stages + 1)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, bk=192 - c.bk, stages=max(2, c.stages // 2) if c.bk == 64 else 2 * c.stages)


def _other_tiles(c: Sm90OddrowsConfig) -> Iterator[Sm90OddrowsConfig]:
    for columns in (64, -64):
        yield replace(c, bn=c.bn + columns)
    if c.a_rows:
        yield replace(c, a_rows=c.a_rows + 8)
        yield replace(c, a_rows=c.a_rows - 8)
        return
    yield replace(c, bm=2 * c.bm)
    yield replace(c, bm=c.bm // 2)
    yield replace(c, bm=2 * c.bm, consumers=2, min_blocks=1)
    yield replace(c, consumers=3 - c.consumers, min_blocks=1)


def _other_ctas(c: Sm90OddrowsConfig) -> Iterator[Sm90OddrowsConfig]:
    """Yield other splits of K, tile orders and numbers of resident CTAs."""
    for split in (c.split_k + 1, c.split_k - 1, 2 * c.split_k, c.split_k // 2):
        yield replace(c, split_k=split)
    yield replace(c, group=2 * c.group)
    yield replace(c, group=c.group // 2)
    yield replace(c, min_blocks=c.min_blocks + 1)
    yield replace(c, min_blocks=c.min_blocks - 1)
