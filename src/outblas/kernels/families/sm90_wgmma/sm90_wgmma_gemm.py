"""The kernel family ``sm90_wgmma_gemm``: TMA loads, an mbarrier pipeline and warp-specialised wgmma.

Its rules and launch are in :class:`WgmmaRules`, its cost is in :class:`WgmmaCost`. Here is what searches try.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.family import TileChoice
from outblas.kernels.families.sm90_wgmma import wgmma_kernels as kernels
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_cost import WgmmaCost
from outblas.kernels.families.sm90_wgmma.wgmma_rules import WgmmaRules
from outblas.kernels.geometry_terms import WGMMA_ROWS

#: Least K for which kernels with a workspace are offered in addition to the catalogue.
MIN_WORKSPACE_K = 4096
#: Values of ``group`` that are tried.
GROUP_CHOICES = (4, 6, 8, 11, 12, 16, 24, 32)
#: Values of ``ctas`` that are tried: multiples of a tile order's width.
CTAS_CHOICES = (128, 120)


class Sm90WgmmaGemm(WgmmaRules, WgmmaCost):
    """The family ``sm90_wgmma_gemm``. ``FAMILIES["sm90_wgmma_gemm"]`` is its instance."""

    config = Sm90WgmmaConfig
    pool_place = 2
    offer_place = 1
    residual_place = 0
    follows_heuristics = True
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"group": GROUP_CHOICES, "ctas": CTAS_CHOICES}

    def pool(self) -> Iterator[Sm90WgmmaConfig]:
        yield from kernels.split_kernels()
        yield from kernels.workspace_kernels()
        yield from kernels.tiles_kernels()
        yield from kernels.persistent_kernels()
        yield from kernels.clustered_kernels()
        yield from kernels.swap_kernels()

    def neighbours(self, problem: Problem, config: Sm90WgmmaConfig) -> Sequence[Iterable[Sm90WgmmaConfig]]:
        return [
            _few_rows(problem, config),
            _reducers(config),
            _swapped(problem, config),
            _edges(problem, config),
            _hints(problem, config),
            _orders(config),
            _parts(config),
            _multicast(config),
            _widths(config),
            _depths(config),
            _fewer_ctas(config),
        ]

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[Sm90WgmmaConfig]:
        return (
            *kernels.few_rows_candidates(problem, gpu),
            *self._workspace_candidates(problem, gpu),
            *kernels.swap_candidates(problem, gpu),
            *kernels.paired_candidates(problem, gpu),
            *kernels.exact_rows_candidates(problem, gpu),
            *kernels.large_candidates(problem, gpu),
        )

    def _workspace_candidates(self, problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
        """Return the kernels with a workspace and at most two CTAs per SM, with and without PDL."""
        if problem.k < MIN_WORKSPACE_K or gpu.arch != 90:
            return []
        few = [c for c in kernels.workspace_kernels() if math.prod(self.grid(problem, c, gpu.sms)) <= 2 * gpu.sms]
        return [replace(c, pdl=pdl, reducers=r) for c in few for pdl in (False, True) for r in ("last", "all")]  # type: ignore[arg-type]

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, Sm90WgmmaConfig]]:
        for rows in range(16, WGMMA_ROWS, 8):
            for config in kernels.few_rows_kernels(rows):
                yield Problem(rows, 4096, 8192), config

    def fixed_order_candidates(self, problem: Problem) -> Iterable[Sm90WgmmaConfig]:
        """Return kernels that load just the rows of a small M; those of the pool serve every M."""
        rows = problem.m // 8 * 8 + 7
        return kernels.fitted_kernels(rows) if rows < WGMMA_ROWS else ()

    def adapted_to_problem(self, problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        """Return the config with ``shift=True`` if that may help, else the config itself.

        It helps if M above 64, or N, is no multiple of 64, and a tile reaches past an edge
        (:func:`with_shifted_edges`).
        """
        if problem.m % WGMMA_ROWS and problem.m > WGMMA_ROWS or problem.n % WGMMA_ROWS:
            return with_shifted_edges(problem, config) or config
        return config

    def near_tile_choice(self, choice: TileChoice) -> Iterator[Sm90WgmmaConfig]:
        """Yield configs by rising distance: stages change first, then cluster, split, depth, and the tile."""
        tiles = sorted(
            product((64, 128, 192, 256), range(8, 257, 8)),
            key=lambda t: (abs(t[0] - choice.bm) + abs(t[1] - choice.bn), -t[0] * t[1]),
        )[:12]
        depths = _by_distance((32, 64, 128), choice.bk)
        splits = _by_distance((1, 2, 4, 8, 16), choice.split_k)
        splits = [s for s in splits if s <= max(1, choice.split_k)] or [1]
        clusters = dict.fromkeys(((choice.cluster_m, choice.cluster_n), (1, 1)))
        for (bm, bn), bk, split, (cm, cn) in product(tiles, depths, splits, clusters):
            for stages, store in product(range(min(12, max(2, choice.stages)), 1, -1), ("tma", "direct")):
                yield Sm90WgmmaConfig(
                    bm, bn, bk, stages, consumers=min(3, bm // 64) if bm != 256 else 2, cluster_m=cm, cluster_n=cn,
                    split_k=split, raster="n" if choice.order else "m", store=store,  # type: ignore[arg-type]
                )  # fmt: skip

    def proof_shapes(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        """Return (M, N, K) of problems that prove workspaces and few rows of A, as a list.

        It has two shapes if ``split_kind`` is ``workspace``, then four if ``a_rows`` is not 0. It is empty for other
        configs.
        """
        bm, bn, bk = config.bm, config.bn, config.bk
        shapes = []
        if config.split_kind == "workspace":  # each part has one stage or two
            together = bk * config.split_k
            shapes += [(3 * bm + 1, 5 * bn + 8, together + 8), (bm + 1, together + 8, together + 8)]
        if config.a_rows:  # M may not exceed a_rows
            rows, deep = config.a_rows, bk * max(config.split_k, config.stages + 1)
            shapes += [
                (rows, 2 * bn, deep),
                (rows - 1, bn + 8, deep + 8),
                (rows // 2 + 1, 19 * bn + 8, 4096 + 8),
                (rows, 256, 256),
            ]
        return shapes


def _by_distance(values: Iterable[int], wanted: int) -> list[int]:
    return sorted(values, key=lambda v: (abs(v - wanted), v))


def with_shifted_edges(problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig | None:
    """Return a copy of the config with ``shift=True``; None if no tile can be moved inside.

    A tile can be moved if M exceeds ``bm`` and is no multiple of it, or N likewise exceeds ``bn``. An extent that is
    smaller than one tile does not count.
    """
    ragged = (problem.m > config.bm and problem.m % config.bm) or (problem.n > config.bn and problem.n % config.bn)
    return replace(config, shift=True) if ragged else None


def _few_rows(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with only the existing rows of A, with and without using the freed room for stages."""
    rows = kernels.rows_to_load(problem)
    if c.bm == WGMMA_ROWS and (c.a_rows or c.bm) > rows:
        few = replace(c, a_rows=rows)
        yield replace(few, stages=min(16, c.stages * (c.loaded_rows + c.bn) // (few.loaded_rows + c.bn)))
        yield few


def _reducers(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with the other value of ``reducers``, if it has a workspace."""
    if c.split_kind == "workspace":
        yield replace(c, reducers="last" if c.reducers == "all" else "all")


def _swapped(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield transposed kernels with this tile, and with heights that only they can have."""
    if problem.layout != "TN" or c.split_k > 1 or c.a_rows or c.store != "tma":
        return
    if c.swap:
        for more in (16, -16, 8, -8):
            if 8 <= c.bm + more <= 256:
                yield replace(c, bm=c.bm + more)
        return
    consumers = kernels.SWAPPED_CONSUMERS.get(c.bn)
    if consumers is not None:
        consumers = 2 if c.schedule == "pingpong" else consumers
        for bm in (c.bm, c.bm - 32, c.bm - 16, c.bm + 16):
            yield replace(c, bm=bm, consumers=consumers, swap=True)


def _fewer_ctas(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield a persistent config with fewer CTAs, which tile orders of powers of two fill evenly."""
    if c.persistent and c.min_blocks == 1:
        for ctas in CTAS_CHOICES:
            for group in dict.fromkeys((c.group, 16)):
                yield replace(c, ctas=ctas, group=group)


def _edges(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with the other value of ``shift``, if a tile reaches past an edge."""
    if with_shifted_edges(problem, c) is not None:
        yield replace(c, shift=not c.shift)


def _hints(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with each L2 hint, the most promising first."""
    # The larger operand is read once.
    once, again = ("b", "a") if problem.n >= problem.m else ("a", "b")
    for l2 in (f"stream_{once}", f"stream_{once}c", "stream_c", f"stream_{again}", "plain"):
        yield replace(c, l2=l2)  # type: ignore[arg-type]


def _orders(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other tile orders."""
    yield replace(c, raster="n" if c.raster == "m" else "m")
    for group in sorted(GROUP_CHOICES, key=lambda g: abs(g.bit_length() - c.group.bit_length())):
        yield replace(c, group=group)


def _parts(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other splits of K, if K is split."""
    if c.split_k == 1:
        return
    if c.split_kind == "workspace":
        yield replace(c, split_k=c.split_k + 1)
        yield replace(c, split_k=c.split_k - 1)
        yield replace(c, split_kind="cluster")
    else:
        yield replace(c, split_kind="workspace")
        yield replace(c, split_k=c.split_k + 1)
        yield replace(c, split_k=c.split_k - 1)


def _multicast(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    for cm, cn in ((1, 1), (2, 1), (1, 2)):
        yield replace(c, cluster_m=cm, cluster_n=cn)


def _widths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with narrower tiles (the stages still fit), because more tiles may fill the last wave."""
    for less in (16, 8, 32):
        if c.bn - less >= 32:
            yield replace(c, bn=c.bn - less)


def _depths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    if c.bk == 64 and c.stages >= 4:
        yield replace(c, bk=128, stages=c.stages // 2)
    if c.bk == 128:
        yield replace(c, bk=64, stages=2 * c.stages)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, stages=c.stages + 1)


FAMILY = Sm90WgmmaGemm()
