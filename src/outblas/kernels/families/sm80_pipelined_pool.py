"""The kernels of ``sm80_pipelined_gemm`` that are tried: its pool, the kernels for a problem, and neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm80_pipelined_config import Sm80PipelinedConfig
from outblas.kernels.geometry_terms import ceil_div

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
#: CTAs per SM up to which a split of K is offered.
_CTAS_PER_SM = 4


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


def pool() -> Iterator[Sm80PipelinedConfig]:
    """Yield the family's kernels, launch options off: :func:`plain_kernels`, those that walk, those that split K."""
    yield from plain_kernels()
    yield from persistent_kernels()
    yield from split_kernels()


def candidates(problem: Problem, gpu: Gpu) -> tuple[Sm80PipelinedConfig, ...]:
    """Return the kernels to try on a problem; some may be illegal. With wgmma the result is empty.

    They are those of the pool. But K is split only if the CTAs are then at most four per SM. CTAs walk only if there
    are more tiles than CTAs. Each config comes without PDL, then from sm_90 on with PDL.

    Args:
        problem: the problem.
        gpu: the GPU.
    """
    if gpu.wgmma_tflops > 0:
        return ()
    options = (False, True) if gpu.arch >= 90 else (False,)
    fitting = (config for config in dict.fromkeys(pool()) if _may_pay(problem, config, gpu.sms))
    return tuple(replace(config, pdl=pdl) for config in fitting for pdl in options)


def unaligned_candidates(
    problem: Problem, gpu: Gpu, listed: Iterable[Sm80PipelinedConfig]
) -> Iterator[Sm80PipelinedConfig]:
    """Yield listed kernels and :func:`candidates` with the widest loads that the rows allow.

    ``vec`` is the largest of 8, 4, 2 and 1 that divides K and the row length of B as stored.

    Args:
        problem: the problem.
        gpu: the GPU.
        listed: the family's configs in the catalogue.
    """
    vec = next(v for v in (8, 4, 2, 1) if problem.k % v == 0 and problem.b_shape[1] % v == 0)
    for config in (*listed, *candidates(problem, gpu)):
        yield replace(config, vec=vec)


def _may_pay(problem: Problem, c: Sm80PipelinedConfig, sms: int) -> bool:
    tiles = ceil_div(problem.m, c.bm) * ceil_div(problem.n, c.bn)
    if c.persistent:
        return tiles > sms * c.min_blocks
    return c.split_k == 1 or tiles * c.split_k <= _CTAS_PER_SM * sms


def transposed(c: Sm80PipelinedConfig) -> Sm80PipelinedConfig:
    """Return the config with rows and columns of tile and warps exchanged."""
    return replace(c, bm=c.bn, bn=c.bm, wm=c.wn, wn=c.wm)


def neighbours(c: Sm80PipelinedConfig) -> list[Iterator[Sm80PipelinedConfig]]:
    """Return ideas near a config: its ring, its tile, the number of its CTAs. Some configs may be illegal."""
    return [_other_rings(c), _other_tiles(c), _other_ctas(c)]


def _other_rings(c: Sm80PipelinedConfig) -> Iterator[Sm80PipelinedConfig]:
    yield replace(c, stages=c.stages + 1)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, bk=2 * c.bk, stages=max(2, c.stages // 2))
    yield replace(c, bk=c.bk // 2, stages=min(6, 2 * c.stages))
    yield replace(c, bk=2 * c.bk)


def _other_tiles(c: Sm80PipelinedConfig) -> Iterator[Sm80PipelinedConfig]:
    """Yield tiles with one block of warps more or less, with other warps, and transposed."""
    for rows in (16 * c.wm, -16 * c.wm):
        yield replace(c, bm=c.bm + rows)
    for columns in (16 * c.wn, -16 * c.wn):
        yield replace(c, bn=c.bn + columns)
    yield replace(c, wm=2 * c.wm)
    yield replace(c, wn=2 * c.wn)
    yield replace(c, wm=c.wm // 2)
    yield replace(c, wn=c.wn // 2)
    yield transposed(c)


def _other_ctas(c: Sm80PipelinedConfig) -> Iterator[Sm80PipelinedConfig]:
    """Yield other splits of K, tile orders and numbers of resident CTAs."""
    if c.persistent:
        yield replace(c, persistent=False)
    else:
        yield replace(c, split_k=c.split_k + 1)
        yield replace(c, split_k=c.split_k - 1)
        yield replace(c, split_k=2 * c.split_k)
        yield replace(c, persistent=True, split_k=1)
    yield replace(c, group=2 * c.group)
    yield replace(c, group=c.group // 2)
    yield replace(c, min_blocks=c.min_blocks + 1)
    yield replace(c, min_blocks=c.min_blocks - 1)
