"""The kernels of ``sm90_wgmma_gemm`` that are tried: those of the pool, and those for special problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry_terms import SMEM_LIMIT, WGMMA_ROWS, ceil_div, divisor_up_to

#: Shares of the SMs that a single wave of transposed tiles must fill to be offered.
FULL_WAVE = 0.8
#: (bm, bn, stages, swap) of kernels of which two share an SM: one fills and drains while the other computes.
_PAIRED_TILES = (
    *((64, 64, 5, False), (64, 96, 5, False), (64, 128, 4, False)),
    *((128, 64, 4, False), (128, 80, 4, False), (128, 96, 3, False), (128, 112, 3, False), (128, 128, 3, False)),
    *(
        (80, 64, 5, True),
        (96, 64, 5, True),
        (112, 64, 4, True),
        (80, 128, 4, True),
        (96, 128, 3, True),
        (112, 128, 3, True),
    ),
)
#: bn of a transposed kernel -> the consumers that share its tile.
SWAPPED_CONSUMERS = {64: 1, 128: 2, 192: 3, 256: 2}
#: Most M whose rows tiles may share evenly: an engine's largest captured step.
MOST_EXACT_ROWS = 512
#: Least FLOP for which kernels of large tiles are offered in addition to the catalogue.
LARGE_FLOP = 1e11
#: Their tiles and schedules.
_LARGE_TILES = (
    *((128, 256, "coop"), (256, 128, "coop"), (256, 192, "coop"), (192, 256, "coop")),
    *((128, 192, "pingpong"), (192, 128, "pingpong")),
)


def split_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels with K split over a cluster; the sums go through distributed shared memory.

    ``split_k`` is 2 to 16, ``store`` is ``direct``, and PDL is off.
    """
    for bm, bn, consumers, splits in (
        (64, 8, 1, (2, 4, 8, 16)),
        (64, 16, 1, (2, 3, 4, 8, 16)),
        (64, 32, 1, (2, 3, 4, 6, 8, 16)),
        (64, 64, 1, (2, 3, 4, 6, 8, 16)),
        (64, 96, 1, (2, 4, 8)),
        (64, 128, 1, (2, 3, 4, 6, 8, 12, 16)),
        (64, 192, 1, (2, 4, 8)),
        (64, 256, 1, (2, 4, 8)),
        (128, 32, 2, (2, 4, 8)),
        (128, 64, 2, (2, 3, 4, 8, 16)),
        (128, 96, 2, (2, 3, 5)),
        (128, 128, 2, (2, 3, 4, 6, 8, 12, 16)),
        (128, 192, 2, (2, 3, 4, 8)),
        (128, 256, 2, (2, 4, 8)),
        (256, 64, 2, (2, 4, 8)),
        (256, 128, 2, (2, 4, 8)),
    ):
        for split in splits:
            inbox = _inbox(bm, bn, consumers, split)
            for bk in (64, 128):
                stages = _stages(bm, bn, bk, inbox)
                if stages >= 2:
                    yield Sm90WgmmaConfig(bm, bn, bk, stages, consumers, split_k=split, store="direct")
            if split <= 8 and bn >= 64:
                for cm, cn in ((2, 1), (1, 2)):
                    stages = _stages(bm, bn, 64, inbox)
                    if stages >= 3:
                        yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, "coop", cm, cn, split, store="direct")


def workspace_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels with K split over a workspace, with and without multicast pairs, without PDL.

    The sums go through global memory, so any number of parts can use all SMs. Here, ``split_k`` is 2 to 16.
    """
    for (bm, bn, consumers), split, (cm, cn) in product(
        ((64, 64, 1), (64, 128, 1), (128, 64, 2), (128, 128, 2), (128, 256, 2)),
        (2, 3, 4, 5, 6, 8, 12, 16),
        ((1, 1), (2, 1), (1, 2)),
    ):
        for bk in (64, 128) if bm * bn <= 128 * 64 else (64,):
            yield Sm90WgmmaConfig(
                *(bm, bn, bk, _stages(bm, bn, bk, 0), consumers, "coop", cm, cn, split),  # type: ignore[arg-type]
                store="direct",
                split_kind="workspace",
            )


def few_rows_kernels(rows: int) -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels for at most ``rows`` rows of A, fewer than wgmma's 64, without PDL. Some may be illegal.

    Stages hold only these rows, and B streams through as many stages as fit. Variants: one tile per CTA, parts of K, a
    walk. All have ``bm=64``, ``a_rows=rows`` and ``l2="stream_b"``.

    Args:
        rows: ``a_rows``, 7 to 63: a multiple of 8, or one less. For other numbers, all kernels are illegal.
    """
    room = Sm90WgmmaConfig(64, 16, a_rows=rows).loaded_rows
    for bn, bk in product((16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256), (64, 128)):
        for split, kind in ((1, "cluster"), (2, "cluster"), (2, "workspace"), (3, "workspace"), (4, "workspace")):
            inbox = _inbox(64, bn, 1, split) if kind == "cluster" else 0
            stages = _stages(room, bn, bk, inbox, 16)
            yield Sm90WgmmaConfig(
                *(64, bn, bk, stages, 1, "coop", 1, 1, split),  # type: ignore[arg-type]
                store="direct", split_kind=kind, l2="stream_b", a_rows=rows,  # type: ignore[arg-type]
            )  # fmt: skip
        stages = _stages(room, bn, bk, 64 * bn * 2, 16)
        yield Sm90WgmmaConfig(64, bn, bk, stages, l2="stream_b", a_rows=rows)
        yield Sm90WgmmaConfig(64, bn, bk, stages, persistent=True, l2="stream_b", a_rows=rows)
        yield Sm90WgmmaConfig(64, bn, bk, stages // 2 - 1, min_blocks=2, l2="stream_b", a_rows=rows)


#: (bn, bk, min_blocks) of :func:`fitted_kernels`, chosen by the cost model on 1,620 products with M of 1 to 60. There
#: the best of these takes 1.0004 times the best of all in the mean, and 1.12 times at most.
_FITTED = (
    (32, 128, 2), (32, 128, 1), (32, 64, 2), (16, 128, 2), (128, 128, 1), (64, 128, 1), (16, 128, 1), (256, 64, 1),
    (16, 64, 2),
)  # fmt: skip


def fitted_kernels(rows: int) -> Iterator[Sm90WgmmaConfig]:
    """Yield the kernels of :func:`few_rows_kernels` that serve any M up to ``rows`` where K must not be split.

    They are few, since packs of compiled kernels hold them all.

    Args:
        rows: ``a_rows``, one less than a multiple of 8.
    """
    few = {(c.bn, c.bk, c.min_blocks): c for c in few_rows_kernels(rows) if c.store == "tma" and not c.persistent}
    return (few[each] for each in _FITTED)


def tiles_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels with one tile per CTA: K is not split, nothing is persistent, and PDL is off."""
    for bn in (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256):
        for bk in (64, 128):
            yield Sm90WgmmaConfig(64, bn, bk, _stages(64, bn, bk, 64 * bn * 2))
        if bn >= 32:
            yield Sm90WgmmaConfig(128, bn, 64, _stages(128, bn, 64, 128 * bn * 2), consumers=2)
        if 32 <= bn <= 128:
            yield Sm90WgmmaConfig(64, bn, 64, min(6, 90_000 // (128 * (64 + bn))), min_blocks=2)
    for bn in (8, 16, 32, 64):
        yield Sm90WgmmaConfig(64, bn, 128, _stages(64, bn, 128, 0), store="direct")
    for bm, bn, consumers in (
        (64, 64, 1),
        (64, 128, 1),
        (128, 64, 2),
        (128, 128, 2),
        (128, 192, 2),
        (128, 256, 2),
        (256, 128, 2),
    ):
        for cm, cn in ((2, 1), (1, 2), (4, 1), (2, 2)):
            stages = _stages(bm, bn, 64, bm * bn * 2 // (2 if bm * bn > 128 * 192 else 1))
            yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, "coop", cm, cn)
    for bm, bn, consumers in ((192, 128, 3), (192, 96, 3), (192, 64, 3), (256, 96, 2), (256, 64, 2)):
        yield Sm90WgmmaConfig(bm, bn, 64, _stages(bm, bn, 64, bm * bn), consumers)


def persistent_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels with one CTA per SM that walks over tiles, for large outputs, without PDL. Some occur twice."""
    clusters = ((1, 1), (2, 1), (1, 2))
    for bm, bn, consumers in (
        *((128, 256, 2), (256, 128, 2), (192, 192, 3), (128, 192, 2), (256, 160, 2), (192, 128, 3), (256, 192, 2)),
    ):
        for (cm, cn), raster, schedule in product(clusters, ("m", "n"), ("coop", "stagger")):
            stages = _stages(bm, bn, 64, 2 * consumers * 64 * 64 * 2)
            if schedule == "coop" or consumers == 2:
                yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, schedule, cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]
    # A tile's epilogue overlaps the other tile: two chunks of stores are enough, and the rest is for stages.
    for bm, bn in (
        *((64, 256), (64, 192), (64, 128), (64, 64)),
        *((128, 64), (128, 96), (128, 112), (128, 128), (128, 144), (128, 160), (128, 176), (128, 192)),
    ):
        for (cm, cn), raster in product(clusters, ("m", "n")):
            if (cm, cn) == (1, 1) or bm * bn >= 64 * 192:
                for chunks in (1, 2, 4):
                    stages = _stages(bm, bn, 64, chunks * 2 * 64 * min(64, bn) * 2)
                    yield Sm90WgmmaConfig(bm, bn, 64, stages, 2, "pingpong", cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]


def clustered_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield persistent kernels whose clusters have four CTAs: fewer bytes through L2, but fewer SMs."""
    for (bm, bn), (cm, cn), raster in product(((128, 256), (256, 128)), ((2, 2), (4, 1), (1, 4)), ("m", "n")):
        stages = _stages(bm, bn, 64, 4 * 64 * 64 * 2)
        yield Sm90WgmmaConfig(bm, bn, 64, stages, 2, "coop", cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]


def swap_kernels() -> Iterator[Sm90WgmmaConfig]:
    """Yield kernels that compute the transpose of C: their tiles have heights that no other kernel has."""
    for bm, bn in product((16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 224, 240), (64, 128, 192, 256)):
        consumers = SWAPPED_CONSUMERS[bn]
        for cm, cn in ((1, 1), (2, 1), (1, 2)):
            stages = _stages(bm, bn, 64, bm * bn * 2)
            if stages >= 3:
                yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, "coop", cm, cn, swap=True)
    for bm, schedule in ((256, "coop"), (192, "coop"), (192, "pingpong"), (176, "pingpong"), (160, "pingpong")):
        for (cm, cn), raster in product(((1, 1), (2, 1), (1, 2)), ("m", "n")):
            bn = 128 if schedule == "pingpong" or bm == 256 else 256
            stages = _stages(bm, bn, 64, 4 * 64 * min(64, bm) * 2)
            yield Sm90WgmmaConfig(bm, bn, 64, stages, 2, schedule, cm, cn, 1, True, raster, 8, swap=True)  # type: ignore[arg-type]


def _inbox(bm: int, bn: int, consumers: int, split: int) -> int:
    """Return approximately the bytes of its peers' sums that a CTA receives (exact: wgmma_rules.py)."""
    units = bm // 64 // consumers * (bn // 8)
    return (split - 1) * consumers * (units // divisor_up_to(units, split)) * 128 * 16


def _stages(bm: int, bn: int, bk: int, other_bytes: int, most: int | None = None) -> int:
    """Return the number of stages that fit beside ``other_bytes``: bytes in flight hide memory latency."""
    return min(most or (12 if bk == 64 else 6), (SMEM_LIMIT - 512 - other_bytes) // (2 * bk * (bm + bn)))


def rows_to_load(problem: Problem) -> int:
    """Return ``a_rows`` of kernels that load just the M rows of A; 64 if a wgmma tile must load all of its rows.

    M = 16 gives 16. M = 9 to 15 give 15: a stage has room for 16 rows, and a load has M.
    """
    rows = -(-problem.m // 8) * 8
    return min(rows if problem.m == rows else rows - 1, WGMMA_ROWS)


def few_rows_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return the kernels that load only the existing rows of A, with and without PDL; none for M up to 8 (gemv)."""
    rows = rows_to_load(problem)
    if not 8 < rows < WGMMA_ROWS or gpu.arch != 90:
        return []
    return [replace(c, pdl=pdl) for c in few_rows_kernels(rows) for pdl in (False, True)]


def swap_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return transposed kernels whose tiles fill one wave well, with and without PDL; none for NN."""
    if problem.layout != "TN" or gpu.arch != 90:
        return []
    least = FULL_WAVE * gpu.sms
    fit = [
        c
        for c in swap_kernels()
        if not c.persistent and least <= ceil_div(problem.m, c.bm) * ceil_div(problem.n, c.bn) <= gpu.sms
    ]
    return [replace(c, pdl=pdl) for c in fit for pdl in (False, True)]


def exact_rows_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return transposed kernels whose tiles share the M rows evenly, without PDL; none for NN, M to 64 or above 512.

    A tile's height is M, or a half or third of it, rounded up to what a cluster can multicast. Rows that do not exist
    cost no energy then. That decides at the power limit, where M = 104 runs faster in 104 rows than in 128.
    """
    if problem.layout != "TN" or gpu.arch != 90 or not WGMMA_ROWS < problem.m <= MOST_EXACT_ROWS:
        return []
    least = ceil_div(problem.m, 256)
    found: dict[Sm90WgmmaConfig, None] = {}
    for parts, (cm, cn), bn in product((least, least + 1), ((1, 1), (2, 1), (1, 2), (1, 4)), (64, 128, 192, 256)):
        rows, tiles = 8 * cn * ceil_div(problem.m, 8 * cn * parts), parts * ceil_div(problem.n, bn)
        fills = tiles >= FULL_WAVE * gpu.sms * ceil_div(tiles, gpu.sms)
        if fills and rows <= 256 and parts % cm == 0:
            found.update(dict.fromkeys(_exact_rows(rows, bn, cm, cn, persistent=tiles > gpu.sms)))
    return list(found)


def _exact_rows(rows: int, bn: int, cm: int, cn: int, persistent: bool) -> Iterator[Sm90WgmmaConfig]:
    """Yield transposed kernels of a tile, B streaming through L2 since it is read once."""
    other = (4 if persistent else 2) * 64 * min(64, rows) * 2
    consumers = SWAPPED_CONSUMERS[bn]
    for pingpong, bk in ((False, 64), (True, 64)) if persistent else ((False, 64), (False, 128)):
        stages = _stages(rows, bn, bk, other)
        if stages >= 3 and not (pingpong and bn == 64):
            yield Sm90WgmmaConfig(
                rows, bn, bk, stages, 2 if pingpong else consumers, "pingpong" if pingpong else "coop", cm, cn,
                persistent=persistent, l2="stream_b", swap=True,
            )  # fmt: skip


def paired_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return kernels of one consumer whose tiles fill the SMs well once, two to an SM, with and without PDL.

    They are for products with a short K, in which a CTA of its own spends much time to fill and to drain. Transposed
    ones are left out for NN.
    """
    if gpu.arch != 90:
        return []
    least, most = 2 * FULL_WAVE * gpu.sms, 2 * gpu.sms
    fit = [
        Sm90WgmmaConfig(bm, bn, 64, stages, min_blocks=2, raster=raster, swap=swap)  # type: ignore[arg-type]
        for (bm, bn, stages, swap), raster in product(_PAIRED_TILES, ("m", "n"))
        if least <= ceil_div(problem.m, bm) * ceil_div(problem.n, bn) <= most and not (swap and problem.layout != "TN")
    ]
    return [replace(c, pdl=pdl) for c in fit for pdl in (False, True)]


def large_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return persistent kernels for products of many tiles that the catalogue lacks, without PDL: it saves nothing."""
    if problem.flops < LARGE_FLOP or gpu.arch != 90:
        return []
    wide = [c for c in (*persistent_kernels(), *swap_kernels()) if (c.bm, c.bn, c.schedule) in _LARGE_TILES]
    wide = [c for c in wide if c.persistent and c.cluster_m * c.cluster_n == 2]
    orders = [replace(c, group=group, ctas=ctas) for c in wide for group, ctas in ((8, 0), (16, 0), (16, 128))]
    return [*orders, *clustered_kernels()]
