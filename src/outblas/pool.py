"""A broad set of kernels, launch options off, from which a catalogue is chosen by measurement.

What is in it is what was thought to pay somewhere; outblas.space says where each is legal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product

from outblas.config import KernelConfig
from outblas.geometry import SMEM_LIMIT, direct_registers, divisor_up_to
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig


@functools.cache
def pool() -> tuple[KernelConfig, ...]:
    """All of them, in a fixed order."""
    families = (
        *(tiny_kernels, direct_kernels, split_kernels, workspace_kernels),
        *(tiles_kernels, persistent_kernels, gemv_kernels),
    )
    return tuple(dict.fromkeys(config for family in families for config in family()))


def tiny_kernels() -> Iterator[KernelConfig]:
    """mma tiles with the K split over warps, and over clusters."""
    for bm, bn, wm, wn, wk, bk, stages in (
        (16, 16, 1, 1, 4, 64, 4),
        (16, 16, 1, 1, 8, 128, 4),
        (16, 32, 1, 1, 4, 64, 4),
        (32, 16, 1, 1, 4, 64, 4),
        (32, 32, 1, 1, 4, 64, 4),
        (32, 32, 1, 1, 8, 128, 3),
        (32, 32, 2, 2, 2, 64, 6),
        (64, 32, 2, 1, 4, 64, 4),
        (64, 32, 2, 1, 4, 128, 3),
        (32, 64, 1, 2, 4, 64, 4),
        (64, 64, 2, 2, 2, 64, 4),
        (64, 64, 2, 2, 4, 64, 4),
        (64, 64, 2, 2, 1, 64, 4),
        (128, 64, 2, 2, 1, 64, 4),
        (128, 128, 2, 4, 1, 64, 3),
    ):
        for split in (1, 2, 4, 8, 16):
            if split == 1 or bm * bn <= 64 * 32:
                yield Sm80MmaConfig(bm, bn, bk, stages, wm, wn, wk, split)


def direct_kernels() -> Iterator[KernelConfig]:
    """Warps of 16 to 32 by 8 to 32; K by one warp, or split over up to 16."""
    for (mt, nt), (wm, wn, wk) in product(
        ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4)),
        ((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 1, 16), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)),
    ):
        for unroll in (1, 2, 4):
            config = Sm80DirectConfig(16 * mt * wm, 8 * nt * wn, wm, wn, wk, unroll)
            held, budget = direct_registers(config)
            if held <= budget and unroll * (8 * mt + 4 * nt) <= 96:
                yield config


def split_kernels() -> Iterator[KernelConfig]:
    """K split over a cluster, sums through distributed shared memory."""
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


def workspace_kernels() -> Iterator[KernelConfig]:
    """K split over CTAs anywhere, sums through global memory: any number of parts uses all SMs, with pairs that
    multicast, too."""
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


def few_rows_kernels(rows: int) -> Iterator[KernelConfig]:
    """At most ``rows`` of A, fewer than wgmma's 64: stages hold no more of them, and B streams through as many stages
    as fit, over one tile per CTA, parts of K, or a walk."""
    for bn, bk in product((16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256), (64, 128)):
        for split, kind in ((1, "cluster"), (2, "cluster"), (2, "workspace"), (3, "workspace"), (4, "workspace")):
            inbox = _inbox(64, bn, 1, split) if kind == "cluster" else 0
            stages = _stages(rows, bn, bk, inbox, 16)
            yield Sm90WgmmaConfig(
                *(64, bn, bk, stages, 1, "coop", 1, 1, split),  # type: ignore[arg-type]
                store="direct", split_kind=kind, l2="stream_b", a_rows=rows,  # type: ignore[arg-type]
            )  # fmt: skip
        stages = _stages(rows, bn, bk, 64 * bn * 2, 16)
        yield Sm90WgmmaConfig(64, bn, bk, stages, l2="stream_b", a_rows=rows)
        yield Sm90WgmmaConfig(64, bn, bk, stages, persistent=True, l2="stream_b", a_rows=rows)
        yield Sm90WgmmaConfig(64, bn, bk, stages // 2 - 1, min_blocks=2, l2="stream_b", a_rows=rows)


def _inbox(bm: int, bn: int, consumers: int, split: int) -> int:
    """Bytes that one CTA receives of its peers' sums (geometry.py has the exact figure)."""
    units = bm // 64 // consumers * (bn // 8)
    return (split - 1) * consumers * (units // divisor_up_to(units, split)) * 128 * 16


def tiles_kernels() -> Iterator[KernelConfig]:
    """One tile per CTA."""
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


def _stages(bm: int, bn: int, bk: int, other_bytes: int, most: int | None = None) -> int:
    """As many stages as fit beside ``other_bytes``: bytes in flight are what hides memory latency."""
    return min(most or (12 if bk == 64 else 6), (SMEM_LIMIT - 512 - other_bytes) // (2 * bk * (bm + bn)))


def persistent_kernels() -> Iterator[KernelConfig]:
    """One CTA per SM walks over tiles: large outputs."""
    clusters = ((1, 1), (2, 1), (1, 2))
    for bm, bn, consumers in ((128, 256, 2), (256, 128, 2), (192, 192, 3), (128, 192, 2), (256, 160, 2), (192, 128, 3)):
        for (cm, cn), raster, schedule in product(clusters, ("m", "n"), ("coop", "stagger")):
            stages = _stages(bm, bn, 64, 2 * consumers * 64 * 64 * 2)
            if schedule == "coop" or consumers == 2:
                yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, schedule, cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]
    # The epilogue of a tile has the other tile's time: two chunks of stores will do, and the rest is stages.
    for bm, bn in (
        *((64, 256), (64, 192), (64, 128), (64, 64)),
        *((128, 64), (128, 96), (128, 112), (128, 128), (128, 144), (128, 160), (128, 176)),
    ):
        for (cm, cn), raster in product(clusters, ("m", "n")):
            if (cm, cn) == (1, 1) or bm * bn >= 64 * 192:
                for chunks in (1, 2, 4):
                    stages = _stages(bm, bn, 64, chunks * 2 * 64 * min(64, bn) * 2)
                    yield Sm90WgmmaConfig(bm, bn, 64, stages, 2, "pingpong", cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]


def gemv_kernels() -> Iterator[KernelConfig]:
    """At most 16 tokens: from 16 weight rows per CTA (many CTAs) to 128 (tokens read less often)."""
    for bn, wn, wk, unroll, ring in (
        (16, 1, 8, 4, "registers"),
        (16, 1, 4, 4, "registers"),
        (32, 1, 8, 2, "registers"),
        (32, 2, 4, 4, "registers"),
        (64, 1, 8, 2, "registers"),
        (64, 1, 4, 2, "registers"),
        (128, 2, 4, 2, "registers"),
        (16, 1, 8, 4, "shared"),
        (16, 1, 4, 6, "shared"),
        (32, 1, 8, 2, "shared"),
        (32, 1, 8, 3, "shared"),
        (32, 1, 4, 4, "shared"),
        (64, 4, 2, 4, "shared"),
        (64, 2, 4, 4, "shared"),
        (64, 1, 4, 2, "shared"),
        (64, 1, 8, 2, "shared"),
        (128, 2, 4, 2, "shared"),
        (128, 2, 4, 4, "shared"),
    ):
        for bm, split in product((8, 16), (1, 2, 4, 8)):
            if split < 8 or bn >= 64:
                yield Sm80GemvConfig(bm, bn, wn, wk, unroll, ring, split)  # type: ignore[arg-type]
    # CTAs that walk over tiles: tokens through L1, or kept up to the K that shared memory has room for.
    for bm, bn, wk, unroll, ring, kept_k in (
        *((bm, 16, 8, 4, "registers", kept_k) for bm in (8, 16) for kept_k in (0, 4096)),
        *((bm, 16, 4, 4, "registers", 2048) for bm in (8, 16)),
        (8, 16, 16, 4, "registers", 8192),
        (16, 16, 16, 4, "registers", 4096),
        *((bm, 16, 8, 4, "shared", 0) for bm in (8, 16)),
        *((bm, 64, 4, 2, "registers", 0) for bm in (8, 16)),
    ):
        yield Sm80GemvConfig(bm, bn, 1, wk, unroll, ring, persistent=True, kept_k=kept_k)  # type: ignore[arg-type]
