"""The kernel family ``sm90_oddrows_gemm``: TMA and wgmma for rows that are no multiples of 16 bytes.

TMA wants rows whose distance is a multiple of 16 bytes. Every eighth row of any matrix has such a distance. So A and B
have eight TMA maps each, one for each remainder of the row's number by eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats, smooth_max, workspace_us
from outblas.kernels.cost.tiled import TiledCost
from outblas.kernels.families.family import Family
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.geometry_terms import (
    COMBS,
    COUNTERS_BYTES,
    SM_REGISTERS,
    WGMMA_ROWS,
    WORKSPACE_LIMIT,
    Geometry,
    banded_grid,
    ceil_div,
    split_workspace_bytes,
)


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
    for bm, bn, consumers, bk, stages, blocks in _SPLIT_TILES:
        for split in _SPLITS:
            yield Sm90OddrowsConfig(bm, bn, bk, stages, consumers, split, min_blocks=blocks)


def few_rows_kernels() -> Iterator[Sm90OddrowsConfig]:
    """Yield kernels for M below 64, with K in one part and in several."""
    for rows in FEW_ROWS:
        for bn, bk, stages, blocks in _FEW_ROWS_RINGS:
            for split in (1, 2, 4, 8, 16, 32):
                yield Sm90OddrowsConfig(64, bn, bk, stages, 1, split, a_rows=rows, min_blocks=blocks)


#: Elements of a box's row (combs/maps.cuh).
SPAN = 64
#: Maximum parts of K, and bytes of a tile's counter in the workspace.
MAX_SPLIT, COUNTER_BYTES = 32, 4
#: Registers per thread beside the sums: a row on its way, addresses, loop state. For NN also the order of K.
OTHER_REGISTERS = {"TN": 68, "NN": 88}
#: CTAs per SM up to which a split of K is offered.
_CTAS_PER_SM = 4


class Sm90OddrowsGemm(TiledCost, Family[Sm90OddrowsConfig]):
    """The family ``sm90_oddrows_gemm``. ``FAMILIES["sm90_oddrows_gemm"]`` is its instance."""

    config = Sm90OddrowsConfig
    for_unaligned_rows = True
    instructions = "wgmma"
    combs = COMBS
    #: Coefficients in microseconds, bytes per microsecond, cycles and GHz. They were fitted on the file
    #: results/any_shapes/h200_extension_unaligned.parquet. ``align`` is the time of a row of 128 bytes in shared
    #: memory.
    start: ClassVar[Mapping[str, float]] = {
        "align": 4.96, "launch": 1.94, "launch_pdl": 1.53, "launch_early": 0.5, "cluster": 0.1, "cluster_log": 0.05,
        "latency_l2": 0.233, "latency_hbm": 1.22, "loaded_l2": 0.398, "loaded_hbm": 0.409, "queue": 2.93e7,
        "apart": 1.0, "stacked": 0.208, "clock": 1.65, "issue": 112, "stage": 31.2, "ingest": 104000, "l2": 6.24e6,
        "hbm": 5.15e6, "cache": 30e6, "wave": 0.184, "quantum": 0.778, "epilogue_tma": 0.312, "store_tma": 28100,
        "split": 0.4, "split_peer": 0.03, "exchange": 50e3, "workspace": 1.64,
    }  # fmt: skip
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"group": (1, 2, 4, 8, 16)}

    def why_illegal(self, p: Problem, c: Sm90OddrowsConfig, gpu: Gpu) -> str | None:
        if min(c.bm, c.bn, c.bk, c.stages, c.consumers, c.split_k, c.group, c.min_blocks) < 1:
            return "extents must be positive"
        rules = (
            (gpu.arch != 90, f"wgmma needs sm_90, not sm_{gpu.arch}"),
            (p.acc != "fp32", "sums are in fp32"),
            (c.bm not in (64, 128, 256), "bm must be 64, 128 or 256"),
            (c.bn not in (64, 128, 192, 256), "bn must be 64, 128, 192 or 256"),
            (c.bk not in (64, 128), "bk must be 64 or 128"),
            (not 2 <= c.stages <= 12, "stages must be 2 to 12"),
            (c.consumers not in (1, 2), "consumers must be 1 or 2"),
            (c.bm // WGMMA_ROWS % c.consumers != 0, "consumers do not divide bm / 64"),
            (c.split_k > MAX_SPLIT, "K has at most 32 parts"),
            (
                c.a_rows != 0 and (c.bm != 64 or c.a_rows not in range(8, 64, 8)),
                "a_rows must be 0, or 8 to 56 with bm 64",
            ),
            (not 1 <= c.min_blocks <= 4, "min_blocks must be 1 to 4"),
            (c.min_blocks > 1 and c.consumers > 1, "min_blocks above 1 needs one consumer"),
        )
        for broken, reason in rules:
            if broken:
                return reason
        need, budget = _registers(p, c), _register_budget(c)
        if need > budget:
            return f"{need} registers of sums, operands and addresses: the budget is {budget}"
        return None

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        tiles = -(-p.m // c.bm) * -(-p.n // c.bn)
        split = c.split_k > 1
        return (
            (min(p.m, p.n, p.k) < COMBS, "M, N and K must be 8 or more, for eight TMA maps"),
            (split & (tiles * COUNTER_BYTES > COUNTERS_BYTES), "more tiles than the counters of a workspace"),
            (
                split & (split_workspace_bytes(p, c) > WORKSPACE_LIMIT),
                "a workspace of {workspace_bytes} bytes exceeds 64 MiB",
            ),
            ((c.a_rows > 0) & (c.a_rows < p.m), "M = {p.m} exceeds the {c.a_rows} rows of A that are loaded"),
        )

    def geometry(self, problem: Problem, c: Sm90OddrowsConfig) -> Geometry:
        constants: dict[str, int | bool] = {
            "BM": c.bm, "BN": c.bn, "BK": c.bk, "A_ROWS": c.loaded_rows, "STAGES": c.stages,
            "CONSUMERS": c.consumers, "SPLIT": c.split_k, "GROUP": c.group, "MIN_BLOCKS": c.min_blocks,
            "PRODUCER_REGS": 56, "CONSUMER_REGS": 224, "PDL": c.pdl, "EARLY_B": c.early,
            "N_MAJOR": problem.layout == "NN", "BF16": problem.dtype == "bf16",
        }  # fmt: skip
        if c.split_k > 1:
            constants["COUNTERS_BYTES"] = COUNTERS_BYTES
        stage = c.bk * (c.loaded_rows + c.bn) * ELEMENT_BYTES
        read = (c.stages - 1) * stage + 2 * SPAN * ((c.bk // SPAN - 1) * c.loaded_rows + max(WGMMA_ROWS, c.loaded_rows))
        return Geometry(
            threads=c.threads,
            smem_bytes=max(c.stages * stage, read, c.bm * c.bn * ELEMENT_BYTES) + 16 * c.stages,
            cluster=1,
            accumulators=_accumulators(c),
            values=constants,
        )

    def grid(self, problem: Problem, config: Sm90OddrowsConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        x, y, z = banded_grid(tiles_m, tiles_n, config.group, 1)
        return x, y, z * config.split_k

    def workspace_bytes(self, problem: Problem, config: Sm90OddrowsConfig) -> int:
        return split_workspace_bytes(problem, config) if config.split_k > 1 else 0

    def source_lines(self, config: Sm90OddrowsConfig) -> Sequence[str]:
        return [f"#define SPLIT_WORKSPACE {int(config.split_k > 1)}"]

    def headers(self, problem: Problem, config: Sm90OddrowsConfig) -> tuple[tuple[str, str], ...]:
        return (("generated/wgmma_instance.cuh", wgmma_instance(config.bn, problem)),)

    def tensor_boxes(self, problem: Problem, config: Sm90OddrowsConfig) -> tuple[tuple[int, int, int, int], ...]:
        rows = config.loaded_rows // COMBS
        rows_b = config.bn if problem.layout == "TN" else SPAN
        return (problem.m, problem.k, rows, SPAN), (*problem.b_shape, rows_b // COMBS, SPAN)

    def why_no_epilogue(self, config: Sm90OddrowsConfig) -> str | None:
        return "a kernel for rows of any length has no epilogue"

    def pool(self) -> Iterator[Sm90OddrowsConfig]:
        yield from plain_kernels()
        yield from split_kernels()
        yield from few_rows_kernels()

    def neighbours(self, problem: Problem, config: Sm90OddrowsConfig) -> Sequence[Iterable[Sm90OddrowsConfig]]:
        return [_other_rings(config), _other_tiles(config), _other_ctas(config)]

    def unaligned_candidates(
        self, problem: Problem, gpu: Gpu, listed: Sequence[Sm90OddrowsConfig]
    ) -> Iterator[Sm90OddrowsConfig]:
        """Yield the kernels of the pool to try on a problem, each without PDL, then with it; some may be illegal.

        K is split only if the CTAs are then at most four per SM. A small M has the kernels that load as few rows as
        serve it, and no others.
        """
        rows = next((rows for rows in FEW_ROWS if rows >= problem.m), 0)
        for config in self.pool():
            tiles = ceil_div(problem.m, config.bm) * ceil_div(problem.n, config.bn)
            if config.a_rows == rows and (config.split_k == 1 or tiles * config.split_k <= _CTAS_PER_SM * gpu.sms):
                yield config
                yield replace(config, pdl=True)

    def proof_shapes(self, problem: Problem, config: Sm90OddrowsConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        """Return four (M, N, K): rows of every remainder by 8 in one tile or in several, K within a stage or beyond."""
        bm, bn, bk = config.loaded_rows, config.bn, config.bk
        down = 1 if config.a_rows else 3  # tiles: a_rows serves one
        return [
            (max(COMBS, bm - 1), 2 * bn - 3, (config.stages + 1) * bk * config.split_k + 5),
            (max(COMBS, down * bm - 3), bn + 9, bk * (config.split_k - 1) + 9),
            (max(COMBS, down * bm - 6), 3 * bn - 20, (config.stages - 1) * bk * config.split_k + 2),
            (down * bm, 9 * bn - 4, 2 * bk * config.split_k + 12),
        ]

    def registers(self, problem: Problem, config: Sm90OddrowsConfig, shape: Geometry) -> int:
        """Return the registers per thread that limit the CTAs of an SM. Two consumers share the whole register file."""
        return SM_REGISTERS // shape.threads if config.consumers > 1 else _registers(problem, config)

    def cost_columns(self, problem: Problem, config: Sm90OddrowsConfig, shape: Geometry) -> dict[str, Any]:
        """Return the inputs of the cost model that depend on a config: name -> number or bool.

        ``workspace`` is True with ``split_k`` above 1, and ``rows`` are the rows of A in a stage. The other keys are
        knobs.
        """
        return {
            "stages": config.stages, "min_blocks": config.min_blocks, "group": config.group, "tma": True,
            "consumers": config.consumers, "workspace": config.split_k > 1, "rows": config.loaded_rows,
        }  # fmt: skip

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        m64nNk16 takes N / 2 cycles of the tensor cores; shared memory delivers its operands in 16 + N / 4. The threads
        put right each row of 128 bytes of A and B meanwhile. Before the first product they have nothing to hide it.
        """
        k16 = c["bk"] / 16
        cycles = k16 * (c["bm"] / 64) * smooth_max(c["bn"] / 2, 16 + c["bn"] / 4)
        rows = (c["rows"] + c["bn"]) * c["bk"] / 64
        tensor = smooth_max(cycles, x["align"] * rows)
        return tensor / (x["clock"] * 1e3), (x["stage"] + x["issue"] * k16 / 4) / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        return x["epilogue_tma"] + ELEMENT_BYTES * c["bm"] * c["bn"] / x["store_tma"]

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        return sums + workspace_us(x, c, tiles)


def _accumulators(c: Sm90OddrowsConfig) -> int:
    """Return the accumulator registers per thread, one per fp32 sum."""
    return max(1, c.bm // WGMMA_ROWS // c.consumers) * c.bn // 2


def _registers(p: Problem, c: Sm90OddrowsConfig) -> int:
    """Return the registers that a consumer's thread needs, without spills."""
    return _accumulators(c) + OTHER_REGISTERS[p.layout]


def _register_budget(c: Sm90OddrowsConfig) -> int:
    """Return the registers that a consumer's thread may use: 224 of two consumers, else 255 for one CTA per SM.

    With ``min_blocks`` above 1 it is 168 for 2, 128 for 3, 96 for 4. A quarter of an SM has a quarter of its registers
    and whole warps.
    """
    if c.consumers > 1:
        return 224
    warps = ceil_div(c.threads // 32 * c.min_blocks, 4)
    return 255 if c.min_blocks == 1 else SM_REGISTERS // 4 // 32 // warps // 8 * 8


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


FAMILY = Sm90OddrowsGemm()
