"""The kernel family ``sm80_pipelined_gemm``: large tiles of mma.sync, fed by a ring of cp.async stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats, smooth_max, workspace_us
from outblas.kernels.cost.tiled import Rounds, TiledCost
from outblas.kernels.families.family import Family
from outblas.kernels.geometry_terms import (
    COUNTERS_BYTES,
    SM_REGISTERS,
    WORKSPACE_LIMIT,
    Geometry,
    banded_grid,
    ceil_div,
    split_workspace_bytes,
)


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


#: Maximum parts of K.
MAX_SPLIT = 32
#: Maximum rows or columns of a tile, and warps of a CTA.
MAX_TILE, MAX_WARPS = 256, 16
#: Bytes of a tile's counter in the workspace (pipelined/part_sums.cuh).
COUNTER_BYTES = 4
#: Registers per thread in addition to accumulators and operands: addresses, loop state, copies in flight.
OTHER_REGISTERS = 54
#: CTAs per SM up to which a split of K is offered.
_CTAS_PER_SM = 4


class Sm80PipelinedGemm(TiledCost, Family[Sm80PipelinedConfig]):
    """The family ``sm80_pipelined_gemm``. ``FAMILIES["sm80_pipelined_gemm"]`` is its instance."""

    config = Sm80PipelinedConfig
    without_wgmma = True
    any_alignment = "vec=1"
    start: ClassVar[Mapping[str, float]] = {
        "launch": 0.9, "launch_pdl": 0.5, "launch_early": 0.3, "cluster": 0.1, "cluster_log": 0.05,
        "latency_l2": 0.4, "latency_hbm": 0.9, "loaded_l2": 0.4, "loaded_hbm": 0.5, "queue": 3e7, "apart": 1.0,
        "stacked": 0.3, "clock": 1.6, "issue": 12.0, "stage": 50.0, "copy": 4.0, "scalar": 70.0, "shared": 210e3,
        "ingest": 60e3, "l2": 5.0e6, "hbm": 3.8e6, "cache": 30e6, "wave": 0.2, "tile": 0.2, "quantum": 0.9,
        "epilogue_direct": 0.3, "store_direct": 60e3, "split": 0.4, "split_peer": 0.03, "exchange": 50e3,
        "workspace": 1.2,
    }  # fmt: skip
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"vec": (1, 2, 4, 8), "group": (1, 2, 4, 8, 16)}

    def why_illegal(self, p: Problem, c: Sm80PipelinedConfig, gpu: Gpu) -> str | None:
        if min(c.bm, c.bn, c.bk, c.wm, c.wn, c.stages, c.split_k, c.vec, c.group, c.min_blocks) < 1:
            return "extents must be positive"
        rules = (
            (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
            (c.bm % (16 * c.wm) != 0, "wm does not divide bm / 16"),
            (c.bn % (16 * c.wn) != 0, "wn does not divide bn / 16"),
            (max(c.bm, c.bn) > MAX_TILE, "bm and bn are at most 256"),
            (c.wm * c.wn > MAX_WARPS, "at most 16 warps"),
            (c.bk not in (16, 32, 64), "bk must be 16, 32 or 64"),
            (not 2 <= c.stages <= 6, "stages must be 2 to 6"),
            (c.vec not in (1, 2, 4, 8), "vec must be 1, 2, 4 or 8"),
            (c.split_k > MAX_SPLIT, "K has at most 32 parts"),
            (c.split_k > 1 and c.persistent, "split_k is for kernels that are not persistent"),
            (c.min_blocks > 4, "min_blocks must be 1 to 4"),
            (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
            (c.early and c.vec == 1, "early needs vec above 1: scalar loads wait for themselves"),
        )
        for broken, reason in rules:
            if broken:
                return reason
        need = _registers(c, _accumulators(c, p.acc == "fp16"))
        budget = min(255, SM_REGISTERS // (c.threads * c.min_blocks))
        if need > budget:
            return f"{need} registers of sums, operands and addresses: the budget is {budget} for {c.threads} threads"
        return None

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        unaligned = (p.k % c.vec != 0) | (p.b_shape[1] % c.vec != 0)
        tiles = -(-p.m // c.bm) * -(-p.n // c.bn)
        split = c.split_k > 1
        return (
            (unaligned, "rows are not multiples of vec = {c.vec} elements"),
            (c.persistent & (tiles >= 2**22), "more than 4 million tiles for one CTA to walk over"),
            (split & (tiles * COUNTER_BYTES > COUNTERS_BYTES), "more tiles than the counters of a workspace"),
            (
                split & (split_workspace_bytes(p, c) > WORKSPACE_LIMIT),
                "a workspace of {workspace_bytes} bytes exceeds 64 MiB",
            ),
        )

    def geometry(self, problem: Problem, c: Sm80PipelinedConfig) -> Geometry:
        constants: dict[str, int | bool] = {
            "BM": c.bm, "BN": c.bn, "BK": c.bk, "STAGES": c.stages, "WM": c.wm, "WN": c.wn, "SPLIT": c.split_k,
            "VEC": c.vec, "GROUP": c.group, "PERSISTENT": c.persistent, "MIN_BLOCKS": c.min_blocks,
            "B_K_MAJOR": problem.layout == "TN", "PDL": c.pdl, "EARLY_B": c.early, "BF16": problem.dtype == "bf16",
        }  # fmt: skip
        if c.split_k > 1:
            constants["COUNTERS_BYTES"] = COUNTERS_BYTES
        ring = c.stages * c.bk * (c.bm + c.bn) * ELEMENT_BYTES
        slabs = c.wm * 16 * c.bn * ELEMENT_BYTES  # 16 rows of each warp
        return Geometry(
            threads=c.threads, smem_bytes=ring + slabs if c.persistent else max(ring, slabs), cluster=1,
            accumulators=_accumulators(c, problem.acc == "fp16"), values=constants,
        )  # fmt: skip

    def grid(self, problem: Problem, config: Sm80PipelinedConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        if config.persistent:
            return min(tiles_m * tiles_n, sms * config.min_blocks), 1, 1
        x, y, z = banded_grid(tiles_m, tiles_n, config.group, 1)
        return x, y, z * config.split_k

    def workspace_bytes(self, problem: Problem, config: Sm80PipelinedConfig) -> int:
        return split_workspace_bytes(problem, config) if config.split_k > 1 else 0

    def source_lines(self, config: Sm80PipelinedConfig) -> Sequence[str]:
        """Return the switch of the workspace, one more kernel parameter: ``["#define SPLIT_WORKSPACE 0"]`` or 1."""
        return [f"#define SPLIT_WORKSPACE {int(config.split_k > 1)}"]

    def pool(self) -> Iterator[Sm80PipelinedConfig]:
        """Yield the family's kernels, launch options off: plain ones, those that walk, those that split K."""
        yield from plain_kernels()
        yield from persistent_kernels()
        yield from split_kernels()

    def neighbours(self, problem: Problem, config: Sm80PipelinedConfig) -> Sequence[Iterable[Sm80PipelinedConfig]]:
        """Return ideas near a config: its ring, its tile, the number of its CTAs. Some configs may be illegal."""
        return [_other_rings(config), (*_other_tiles(config), self.transposed(config)), _other_ctas(config)]

    def special_candidates(self, problem: Problem, gpu: Gpu) -> tuple[Sm80PipelinedConfig, ...]:
        """Return the kernels to try on a problem; some may be illegal. With wgmma the result is empty.

        They are those of the pool. But K is split only if the CTAs are then at most four per SM. CTAs walk only if
        there are more tiles than CTAs. Each config comes without PDL, then from sm_90 on with PDL.
        """
        if gpu.wgmma_tflops > 0:
            return ()
        options = (False, True) if gpu.arch >= 90 else (False,)
        fitting = (config for config in dict.fromkeys(self.pool()) if _may_pay(problem, config, gpu.sms))
        return tuple(replace(config, pdl=pdl) for config in fitting for pdl in options)

    def unaligned_candidates(
        self, problem: Problem, gpu: Gpu, listed: Sequence[Sm80PipelinedConfig]
    ) -> Iterator[Sm80PipelinedConfig]:
        """Yield listed kernels and :meth:`special_candidates` with the widest loads that the rows allow.

        ``vec`` is the largest of 8, 4, 2 and 1 that divides K and the row length of B as stored.
        """
        vec = next(v for v in (8, 4, 2, 1) if problem.k % v == 0 and problem.b_shape[1] % v == 0)
        for config in (*listed, *self.special_candidates(problem, gpu)):
            yield replace(config, vec=vec)

    def transposed(self, config: Sm80PipelinedConfig) -> Sm80PipelinedConfig:
        """Return the config with rows and columns of tile and warps exchanged."""
        return replace(config, bm=config.bn, bn=config.bm, wm=config.wn, wn=config.wm)

    def proof_shapes(self, problem: Problem, config: Sm80PipelinedConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        """Return four (M, N, K): odd rows, K within one stage, K of one stage less than the ring, many tiles.

        The last has more tiles than CTAs are resident, and the first of them meet K of two stages and a part.
        """
        bm, bn, bk = config.bm, config.bn, config.bk
        down = ceil_div(3 * gpu.sms * config.min_blocks, 2 * 9)
        return [
            (33, 2 * bn - 2, 2 * bk + 2),
            (bm + 8, bn + 16, 8),
            (2 * bm + 1, 3 * bn - 8, (config.stages - 1) * bk),
            (down * bm - 5, 9 * bn - 8, 2 * bk + 8),
        ]

    def registers(self, problem: Problem, config: Sm80PipelinedConfig, shape: Geometry) -> int:
        return _registers(config, shape.accumulators)

    def cost_columns(self, problem: Problem, config: Sm80PipelinedConfig, shape: Geometry) -> dict[str, Any]:
        """Return the inputs of the cost model that depend on a config: name -> number or bool.

        ``workspace`` is True with ``split_k`` above 1. The other keys are knobs.
        """
        return {
            "stages": config.stages, "wm": config.wm, "wn": config.wn, "vec": config.vec, "group": config.group,
            "persistent": config.persistent, "min_blocks": config.min_blocks, "workspace": config.split_k > 1,
        }  # fmt: skip

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        mma.sync does at most 1,024 multiply-adds a cycle. Each warp reads its operands from shared memory, to which
        the copies write. Reads of the next 16 of K overlap the products of the present ones. So the overhead is a
        barrier, the issue of the copies, and a start per 16 of K. Scalar loads wait for their values as well.
        """
        warps = c["wm"] * c["wn"]
        math_us = c["bm"] * c["bn"] * c["bk"] / 1024 / (x["clock"] * 1e3)
        written = (c["bm"] + c["bn"]) * c["bk"] * ELEMENT_BYTES
        read = (c["bm"] * c["wn"] + c["bn"] * c["wm"]) * c["bk"] * ELEMENT_BYTES
        copies = written / ELEMENT_BYTES / c["vec"] / 32
        each = x["copy"] + np.where(c["vec"] == 1, x["scalar"], 0.0)
        serial = x["stage"] + x["issue"] * c["bk"] / 16 + each * copies / warps
        return smooth_max(math_us, (read + written) / x["shared"]), serial / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        return x["epilogue_direct"] + ELEMENT_BYTES * c["bm"] * c["bn"] / x["store_direct"]

    def persistent_us(self, x: Mapping[str, float], c: Columns, rounds: Rounds, plain: Floats) -> Floats:
        """Return the time of a walk: the first stages of a tile arrive while the one before is stored."""
        each = rounds.main + rounds.store + x["tile"]
        walked = rounds.latency + rounds.count * each - x["tile"]
        return np.where(c["persistent"] > 0, walked, plain)

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        return sums + workspace_us(x, c, tiles)


def _accumulators(c: Sm80PipelinedConfig, fp16: bool) -> int:
    """Return the accumulator registers per thread: one per fp32 sum, or per two fp16 sums."""
    return max(1, c.bm // c.wm // 16 * (c.bn // c.wn // 8)) * (2 if fp16 else 4)


def _registers(c: Sm80PipelinedConfig, accumulators: int) -> int:
    """Return the registers per thread: ``accumulators``, operands of two steps of 16 of K, and 54 others.

    A step has 4 registers for each 16 rows of the warp, and 2 for each 8 columns.
    """
    return accumulators + 2 * (c.bm // c.wm // 16 * 4 + c.bn // c.wn // 8 * 2) + OTHER_REGISTERS


def _may_pay(problem: Problem, c: Sm80PipelinedConfig, sms: int) -> bool:
    tiles = ceil_div(problem.m, c.bm) * ceil_div(problem.n, c.bn)
    if c.persistent:
        return tiles > sms * c.min_blocks
    return c.split_k == 1 or tiles * c.split_k <= _CTAS_PER_SM * sms


def _other_rings(c: Sm80PipelinedConfig) -> Iterator[Sm80PipelinedConfig]:
    yield replace(c, stages=c.stages + 1)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, bk=2 * c.bk, stages=max(2, c.stages // 2))
    yield replace(c, bk=c.bk // 2, stages=min(6, 2 * c.stages))
    yield replace(c, bk=2 * c.bk)


def _other_tiles(c: Sm80PipelinedConfig) -> Iterator[Sm80PipelinedConfig]:
    """Yield tiles with one block of warps more or less, and with other warps."""
    for rows in (16 * c.wm, -16 * c.wm):
        yield replace(c, bm=c.bm + rows)
    for columns in (16 * c.wn, -16 * c.wn):
        yield replace(c, bn=c.bn + columns)
    yield replace(c, wm=2 * c.wm)
    yield replace(c, wn=2 * c.wn)
    yield replace(c, wm=c.wm // 2)
    yield replace(c, wn=c.wn // 2)


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


FAMILY = Sm80PipelinedGemm()
