"""The kernel family ``sm90_wgmma_gemm``: TMA loads, an mbarrier pipeline and warp-specialised wgmma."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.problem import ROW_ALIGN_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.cost.tiled import tiled_us
from outblas.kernels.families import sm90_wgmma_cost as cost
from outblas.kernels.families import sm90_wgmma_launch as launch
from outblas.kernels.families import sm90_wgmma_neighbours as near
from outblas.kernels.families.family import CacheHint, Family, TileChoice
from outblas.kernels.geometry_terms import SMEM_LIMIT, WGMMA_ROWS, Geometry, divisor_up_to

Schedule = Literal["coop", "stagger", "pingpong"]
Store = Literal["tma", "direct"]
Raster = Literal["m", "n"]
SplitKind = Literal["cluster", "workspace"]
#: Least K for which kernels with a workspace are offered in addition to the catalogue.
MIN_WORKSPACE_K = 4096


@dataclass(frozen=True, order=True)
class Sm90WgmmaConfig(KernelConfig):
    """Knobs of ``sm90_wgmma_gemm``: TMA loads, mbarrier pipeline, warp-specialised wgmma.

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: rows of a C tile, elements: 64, 128, 192 or 256.
        bn: columns of a C tile, elements: a multiple of 8 up to 256.
        bk: depth of one pipeline stage, elements of K: 64 or 128.
        stages: pipeline depth, 2 to 16.
        consumers: warpgroups that issue wgmma, 1 to 3.
        schedule: ``coop``: consumers share a tile. ``stagger``: the same, one after the other, so that their epilogues
            do not coincide. ``pingpong``: they alternate tiles.
        cluster_m: CTAs of a cluster along M; operand tiles are multicast in it.
        cluster_n: CTAs of a cluster along N.
        split_k: CTAs that share one tile's K; above 1, it needs ``store="direct"`` and ``persistent=False``.
        persistent: one CTA per SM walks over tiles; False: one CTA per tile.
        raster: extent along which consecutive tiles go first.
        group: tiles that are walked together along ``raster`` before the next tile of the other extent (L2 reuse).
        store: ``tma``: stmatrix to shared memory, then TMA. ``direct``: registers to global memory.
        min_blocks: CTAs per SM that the register allocation must allow.
        pdl: launch option, programmatic dependent launch: the prologue overlaps the predecessor.
        split_kind: ``cluster``: the parts of K are one cluster and sum through distributed shared memory.
            ``workspace``: they run anywhere and write their parts to global memory; the last to arrive sums.
        l2: L2 hint: ``plain``, or the operands that stream through L2. C streams because it is not read again; B or A
            streams if it is read once while the other is read repeatedly.
        early: needs pdl; the first loads of B do not wait for the predecessor (``weights`` in
            :data:`outblas.core.config.Launch`).
        a_rows: rows of A in a stage, fewer than wgmma's 64; 0: all. For problems with at most this M: loads past M are
            slow, and smaller stages allow more of them.
        shift: tiles that would reach past M or N are moved inside, so some of C is computed twice. False: they are
            clipped.
    """

    family: ClassVar[str] = "sm90_wgmma_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("split_kind", "l2", "early", "a_rows", "shift")
    bm: int
    bn: int
    bk: int = 64
    stages: int = 4
    consumers: int = 1
    schedule: Schedule = "coop"
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    persistent: bool = False
    raster: Raster = "m"
    group: int = 8
    store: Store = "tma"
    min_blocks: int = 1
    pdl: bool = False
    split_kind: SplitKind = "cluster"
    l2: CacheHint = "plain"
    early: bool = False
    a_rows: int = 0
    shift: bool = False

    @property
    def loaded_rows(self) -> int:
        """Return the rows of A in a stage."""
        return self.a_rows or self.bm

    @property
    def cluster_split(self) -> int:
        """Return the CTAs of a cluster along K; 1 for a workspace."""
        return 1 if self.split_kind == "workspace" else self.split_k


class Sm90WgmmaGemm(Family[Sm90WgmmaConfig]):
    """The family ``sm90_wgmma_gemm``. ``FAMILIES["sm90_wgmma_gemm"]`` is its instance."""

    config = Sm90WgmmaConfig
    pool_place = 2
    offer_place = 1
    residual_place = 0
    paired_stores = True
    follows_heuristics = True
    instructions = "wgmma"
    start: ClassVar[Mapping[str, float]] = cost.START
    residual_kinds = cost.KINDS
    residual_switches = cost.SWITCHES
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"group": near.GROUP_CHOICES}

    def why_illegal(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> str | None:
        return launch.why_illegal(problem, config, gpu)

    def geometry(self, problem: Problem, config: Sm90WgmmaConfig) -> Geometry:
        return launch.geometry(problem, config)

    def grid(self, problem: Problem, config: Sm90WgmmaConfig, sms: int) -> tuple[int, int, int]:
        return launch.grid(problem, config, sms)

    def min_blocks(self, config: Sm90WgmmaConfig) -> int:
        return config.min_blocks

    def workspace_bytes(self, problem: Problem, config: Sm90WgmmaConfig) -> int:
        return launch.workspace_bytes(problem, config)

    def source_lines(self, config: Sm90WgmmaConfig) -> Sequence[str]:
        """Return the switch for the workspace, which is one more kernel parameter: ``["#define SPLIT_WORKSPACE 0"]``.

        The number is 1 if ``split_kind`` is ``workspace``.
        """
        return [f"#define SPLIT_WORKSPACE {int(config.split_kind == 'workspace')}"]

    def headers(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[str, str], ...]:
        return (("generated/wgmma_instance.cuh", launch.wgmma_instance(config.bn, problem)),)

    def tensor_boxes(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[int, int, int, int], ...]:
        return launch.tensor_boxes(problem, config)

    def alignment(self, config: Sm90WgmmaConfig) -> int:
        return ROW_ALIGN_BYTES

    def pool(self) -> Iterator[Sm90WgmmaConfig]:
        yield from split_kernels()
        yield from workspace_kernels()
        yield from tiles_kernels()
        yield from persistent_kernels()

    def neighbours(self, problem: Problem, config: Sm90WgmmaConfig) -> Sequence[Iterable[Sm90WgmmaConfig]]:
        return near.neighbours(problem, config)

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[Sm90WgmmaConfig]:
        return (*_few_rows_candidates(problem, gpu), *_workspace_candidates(problem, gpu))

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, Sm90WgmmaConfig]]:
        for rows in range(16, WGMMA_ROWS, 8):
            for config in few_rows_kernels(rows):
                yield Problem(rows, 4096, 8192), config

    def adapted_to_problem(self, problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        """Return the config with ``shift=True`` if that may help, else the config itself.

        It helps if M above 64, or N, is no multiple of 64, and a tile reaches past an edge
        (:func:`with_shifted_edges`).
        """
        if problem.m % WGMMA_ROWS and problem.m > WGMMA_ROWS or problem.n % WGMMA_ROWS:
            return near.with_shifted_edges(problem, config) or config
        return config

    def transposed(self, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        return near.transposed(config)

    def near_tile_choice(self, choice: TileChoice) -> Iterable[Sm90WgmmaConfig]:
        return _near_choice(choice)

    def proof_shapes(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> Sequence[tuple[int, int, int]]:
        return near.proof_shapes(config)

    def registers(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> int:
        return cost.registers(config, shape)

    def cost_columns(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> dict[str, Any]:
        return cost.columns(config)

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        return tiled_us(cost.COST, x, p, c, gpu)

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        return cost.kind_index(c)

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        return cost.switch_values(p, c, waves)


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
        rows: a multiple of 8 from 8 to 56; for other numbers, all kernels are illegal.
    """
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
    for bm, bn, consumers in ((128, 256, 2), (256, 128, 2), (192, 192, 3), (128, 192, 2), (256, 160, 2), (192, 128, 3)):
        for (cm, cn), raster, schedule in product(clusters, ("m", "n"), ("coop", "stagger")):
            stages = _stages(bm, bn, 64, 2 * consumers * 64 * 64 * 2)
            if schedule == "coop" or consumers == 2:
                yield Sm90WgmmaConfig(bm, bn, 64, stages, consumers, schedule, cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]
    # A tile's epilogue overlaps the other tile: two chunks of stores are enough, and the rest is for stages.
    for bm, bn in (
        *((64, 256), (64, 192), (64, 128), (64, 64)),
        *((128, 64), (128, 96), (128, 112), (128, 128), (128, 144), (128, 160), (128, 176)),
    ):
        for (cm, cn), raster in product(clusters, ("m", "n")):
            if (cm, cn) == (1, 1) or bm * bn >= 64 * 192:
                for chunks in (1, 2, 4):
                    stages = _stages(bm, bn, 64, chunks * 2 * 64 * min(64, bn) * 2)
                    yield Sm90WgmmaConfig(bm, bn, 64, stages, 2, "pingpong", cm, cn, 1, True, raster, 8)  # type: ignore[arg-type]


def _inbox(bm: int, bn: int, consumers: int, split: int) -> int:
    """Return approximately the bytes of its peers' sums that a CTA receives (exact: sm90_wgmma_launch.py)."""
    units = bm // 64 // consumers * (bn // 8)
    return (split - 1) * consumers * (units // divisor_up_to(units, split)) * 128 * 16


def _stages(bm: int, bn: int, bk: int, other_bytes: int, most: int | None = None) -> int:
    """Return the number of stages that fit beside ``other_bytes``: bytes in flight hide memory latency."""
    return min(most or (12 if bk == 64 else 6), (SMEM_LIMIT - 512 - other_bytes) // (2 * bk * (bm + bn)))


def _few_rows_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return the kernels that load only the existing rows of A, with and without PDL; none for M up to 8 (gemv)."""
    rows = near.rows_to_load(problem)
    if not 8 < rows < WGMMA_ROWS or gpu.arch != 90:
        return []
    return [replace(c, pdl=pdl) for c in few_rows_kernels(rows) for pdl in (False, True)]


def _workspace_candidates(problem: Problem, gpu: Gpu) -> list[Sm90WgmmaConfig]:
    """Return the kernels with a workspace and at most two CTAs per SM, with and without PDL."""
    if problem.k < MIN_WORKSPACE_K or gpu.arch != 90:
        return []
    few = [c for c in workspace_kernels() if math.prod(launch.grid(problem, c, gpu.sms)) <= 2 * gpu.sms]
    return [replace(c, pdl=pdl) for c in few for pdl in (False, True)]


def _near_choice(choice: TileChoice) -> Iterator[Sm90WgmmaConfig]:
    """Yield configs by rising distance: stages change first, then cluster, split, depth, and the tile."""
    tiles = sorted(
        itertools.product((64, 128, 192, 256), range(8, 257, 8)),
        key=lambda t: (abs(t[0] - choice.bm) + abs(t[1] - choice.bn), -t[0] * t[1]),
    )[:12]
    depths = _by_distance((32, 64, 128), choice.bk)
    splits = _by_distance((1, 2, 4, 8, 16), choice.split_k)
    splits = [s for s in splits if s <= max(1, choice.split_k)] or [1]
    clusters = dict.fromkeys(((choice.cluster_m, choice.cluster_n), (1, 1)))
    for (bm, bn), bk, split, (cm, cn) in itertools.product(tiles, depths, splits, clusters):
        for stages, store in itertools.product(range(min(12, max(2, choice.stages)), 1, -1), ("tma", "direct")):
            yield Sm90WgmmaConfig(
                bm, bn, bk, stages, consumers=min(3, bm // 64) if bm != 256 else 2, cluster_m=cm, cluster_n=cn,
                split_k=split, raster="n" if choice.order else "m", store=store,  # type: ignore[arg-type]
            )  # fmt: skip


def _by_distance(values: Iterable[int], wanted: int) -> list[int]:
    """Return the values sorted by distance from ``wanted``."""
    return sorted(values, key=lambda v: (abs(v - wanted), v))


FAMILY = Sm90WgmmaGemm()
