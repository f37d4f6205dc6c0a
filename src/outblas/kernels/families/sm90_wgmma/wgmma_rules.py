"""Rules of ``sm90_wgmma_gemm``: the legality of a config, its geometry, source and launch."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outblas.core.problem import ELEMENT_BYTES, SECTOR_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.family import CacheHint, Family, Summation
from outblas.kernels.families.sm90_wgmma.wgmma_config import NON_ACCUMULATOR_REGISTERS, Sm90WgmmaConfig
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.geometry_terms import (
    COUNTERS_BYTES,
    MAX_CLUSTER,
    SMEM_LIMIT,
    WORKSPACE_LIMIT,
    Geometry,
    banded_grid,
    ceil_div,
    divisor_up_to,
)

#: Number of consumer warpgroups -> their registers per thread after setmaxnreg.
CONSUMER_REGISTERS = {1: 255, 2: 232, 3: 152}
#: Accumulators of a thread, at most, with three consumers. A CTA has 512 threads then, and ptxas gives each 128
#: registers. It does not know what setmaxnreg adds, and refuses an instruction with more operands.
MOST_OF_THREE = 100
#: Maximum parts of K in a workspace.
MAX_WORKSPACE_SPLIT = 32
#: Counters of a tile's warpgroup if all parts add up (epilogue/workspace_reduce.cuh): 8 bytes for each warp.
MEETING_BYTES = 32
#: Rows of gate, and then of up, in the tiles of a kernel of the transpose: those of an accumulator lie 8 apart.
SWAPPED_TURN = 8
#: Bytes that TMA loads per clock of an SM from rows that begin within a sector: 20 on an H100, 24 on an H200.
SPLIT_SECTOR_BYTES = 22.0
#: Knob of an operand or an extent -> the knob's value for the other one.
_TRANSPOSED_HINTS: dict[CacheHint, CacheHint] = {
    "stream_a": "stream_b",
    "stream_b": "stream_a",
    "stream_ac": "stream_bc",
    "stream_bc": "stream_ac",
}


class WgmmaRules(Family[Sm90WgmmaConfig], ABC):
    """Rules, geometry, source and launch of ``sm90_wgmma_gemm``."""

    paired_stores = True
    instructions = "wgmma"

    def transposed(self, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        """Return the config with tiles, clusters, order and hints of M and N swapped."""
        return replace(
            config, bm=config.bn, bn=config.bm, cluster_m=config.cluster_n, cluster_n=config.cluster_m,
            raster="n" if config.raster == "m" else "m", l2=_TRANSPOSED_HINTS.get(config.l2, config.l2),
        )  # fmt: skip

    def as_computed(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[Problem, Sm90WgmmaConfig]:
        """Return the product and the knobs in the kernel's own terms: with ``swap`` it computes the transpose of C."""
        if not config.swap:
            return problem, config
        return replace(problem, m=problem.n, n=problem.m), replace(self.transposed(config), swap=False)

    def why_illegal(self, p: Problem, c: Sm90WgmmaConfig, gpu: Gpu) -> str | None:
        """Return why the config cannot run a problem of any extents by the family's own rules; None if it can.

        Only the first broken rule is named. :func:`outblas.kernels.legality.why_illegal` checks the limits of grid and
        shared memory.
        """
        if c.swap:
            rules = (
                (p.layout != "TN", "swap needs B stored N x K (TN)"),
                (c.store != "tma" or c.split_k > 1, "swap stores by TMA and does not split K"),
                (c.a_rows != 0, "swap loads all rows"),
                (c.bn % 64 != 0, "swap needs bn 64, 128, 192 or 256"),
            )
            for broken, reason in rules:
                if broken:
                    return reason
        return _why_illegal_as_computed(*self.as_computed(p, c), gpu)

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        tiles = -(-p.m // c.bm) * -(-p.n // c.bn)  # the same with ``swap``, which neither splits K nor limits the rows
        large = (c.split_kind == "workspace") & (_workspace_bytes(p, c) > WORKSPACE_LIMIT)
        uncounted = (c.reducers == "all") & (tiles * c.consumers * MEETING_BYTES > COUNTERS_BYTES)
        return (
            (not p.rows_aligned, "rows are not multiples of 16 bytes (TMA)"),
            (c.persistent & (tiles >= 2**22), "more than 4 million tiles for one CTA to walk over"),
            (uncounted, "more tiles than the counters of reducers=all"),
            (large, "a workspace of {workspace_bytes} bytes exceeds 64 MiB"),
            ((c.a_rows > 0) & (c.a_rows < p.m), "M = {p.m} exceeds the {c.a_rows} rows of A that are loaded"),
        )

    def geometry(self, problem: Problem, c: Sm90WgmmaConfig) -> Geometry:
        """Return the geometry for the problem's layout, dtype and accumulator; its extents do not matter.

        A CTA has 128 threads per consumer, plus 32 for the producer, or 128 with more than one consumer.

        Raises:
            KeyError: ``consumers`` is not 1, 2 or 3.
        """
        swap, (problem, c) = c.swap, self.as_computed(problem, c)
        pingpong = c.schedule == "pingpong"
        m_blocks = max(1, c.bm // (1 if pingpong else c.consumers) // 64)
        k_major = problem.layout == "TN"
        b_width = next((w for w in (64, 32, 16) if c.bn % w == 0), 8)
        epi_w = next(w for w in (64, 32, 16, 8) if c.bn % w == 0)
        units = max(1, m_blocks * (c.bn // 8))
        owners = divisor_up_to(units, c.cluster_split)
        inbox = (c.cluster_split - 1) * c.consumers * (units // owners) * 128 * 16
        stage = c.bk * (c.loaded_rows + c.bn) * ELEMENT_BYTES
        stages = c.stages * stage
        barriers = 16 * c.stages + 8
        store_tma = c.store == "tma"
        # As many chunk buffers as fit: with more of them, more stores drain at once.
        chunks = m_blocks * (c.bn // epi_w)
        chunk_bytes = c.consumers * 64 * epi_w * ELEMENT_BYTES
        room = (SMEM_LIMIT // c.min_blocks - (1024 if c.min_blocks > 1 else 0)) - stages - inbox - barriers
        epi_bufs = divisor_up_to(chunks, max(1, room // chunk_bytes)) if store_tma else 1
        if c.persistent:
            epi_bufs = divisor_up_to(chunks, min(epi_bufs, 4))
        producer_regs, consumer_regs = {1: (0, 0), 2: (40, 232), 3: (40, 152)}[c.consumers]
        constants = {
            "BM": c.bm, "A_ROWS": c.loaded_rows, "A_FITS": c.fits_m, "BN": c.bn, "BK": c.bk, "STAGES": c.stages,
            "CONSUMERS": c.consumers, "PINGPONG": pingpong, "STAGGER": c.schedule == "stagger",
            "CLUSTER_M": c.cluster_m, "CLUSTER_N": c.cluster_n, "SPLIT": c.split_k, "OWNERS": owners,
            "PERSISTENT": c.persistent, "RASTER_M": c.raster == "m", "GROUP": c.group, "STREAM_C": c.streams_c,
            "STREAM_B": c.streams_b, "STREAM_A": c.streams_a, "STORE_TMA": store_tma, "EPI_W": epi_w,
            "EPI_BUFS": epi_bufs, "MIN_BLOCKS": c.min_blocks, "PRODUCER_REGS": producer_regs,
            "CONSUMER_REGS": consumer_regs, "B_K_MAJOR": k_major, "B_WIDTH": b_width, "PDL": c.pdl,
            "EARLY_B": c.early, "SHIFT": c.shift, "SWAP": swap, "BF16": problem.dtype == "bf16",
        }  # fmt: skip
        accumulators = m_blocks * c.bn // 2 // (2 if problem.acc == "fp16" else 1)
        # wgmma reads 64 rows of A even if fewer were loaded. The results of the other rows are never stored.
        read = stages - stage + 128 * ((c.bk // 64 - 1) * c.loaded_rows + 64) if c.a_rows else 0
        if c.split_kind == "workspace":
            constants |= {"COUNTERS_BYTES": COUNTERS_BYTES, "LOADS": workspace_loads(c)}
        return Geometry(
            threads=128 * c.consumers + (32 if c.consumers == 1 else 128),
            smem_bytes=max(stages + (epi_bufs * chunk_bytes if store_tma else 0) + inbox + barriers, read),
            cluster=c.cluster_m * c.cluster_n * c.cluster_split,
            accumulators=accumulators,
            values=constants,
        )

    def grid(self, problem: Problem, config: Sm90WgmmaConfig, sms: int) -> tuple[int, int, int]:
        """Return the number of CTAs along x, y and z, all CTAs of clusters included.

        A persistent kernel has (CTAs, 1, 1). Otherwise tiles along ``raster`` are walked in bands of ``group``. x is a
        band's tiles times the CTAs of a cluster, y is the other extent, and z is the number of bands. Extents are
        counted in clusters. The parts of a workspace multiply z.

        Args:
            sms: number of SMs; only a persistent kernel depends on it.
        """
        problem, config = self.as_computed(problem, config)
        cluster = config.cluster_m * config.cluster_n * config.cluster_split
        tiles_m = ceil_div(problem.m, config.bm * config.cluster_m)
        tiles_n = ceil_div(problem.n, config.bn * config.cluster_n)
        if config.persistent:
            resident = (config.ctas or sms * config.min_blocks) // cluster
            return min(tiles_m * tiles_n, max(1, resident)) * cluster, 1, 1
        inner, outer = (tiles_m, tiles_n) if config.raster == "m" else (tiles_n, tiles_m)
        x, y, z = banded_grid(inner, outer, config.group, cluster)
        return x, y, z * (config.split_k // config.cluster_split)

    def workspace_bytes(self, problem: Problem, config: Sm90WgmmaConfig) -> int:
        """Return the size of the workspace, bytes; 0 unless ``split_kind`` is ``workspace``.

        It holds 65536 bytes of counters, then every CTA's tile in fp32 (epilogue/workspace_reduce.cuh). Tiles are
        counted in whole clusters. Example: 4 tiles of 64 x 64 with ``split_k=2`` need
        65536 + 4 * 2 * 64 * 64 * 4 = 196608 bytes.
        """
        return _workspace_bytes(problem, config) if config.split_kind == "workspace" else 0

    def summation(self, config: Sm90WgmmaConfig) -> Summation | None:
        """Return ``wgmma``, or None with a split K.

        Consumers share rows or alternate tiles, and never share K. A swapped kernel multiplies the same pairs. A deeper
        stage only adds zeros past the end of K.
        """
        return "wgmma" if config.split_k == 1 else None

    def split_sector_us(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> float:
        """Return the traffic from L2, that of each cluster once, over its rate; that of aligned rows is L2's."""
        p, down, right = problem, -(-problem.m // config.bm), -(-problem.n // config.bn)
        loads = (
            (p.k, p.m * p.k * right / min(config.cluster_n, right)),
            (p.b_shape[1], p.n * p.k * down / min(config.cluster_m, down)),
        )
        split = SPLIT_SECTOR_BYTES * gpu.sms * gpu.clock_mhz
        rates = (split if row * ELEMENT_BYTES % SECTOR_BYTES else gpu.l2_tbs * 1e6 for row, _ in loads)
        return sum(elements * ELEMENT_BYTES / rate for (_, elements), rate in zip(loads, rates, strict=True))

    def source_lines(self, config: Sm90WgmmaConfig) -> Sequence[str]:
        """Return the switches of the workspace, e.g. ``["#define SPLIT_WORKSPACE 1", "#define REDUCE_ALL 0"]``.

        The first is 1 if ``split_kind`` is ``workspace``, which is one more kernel parameter. Only then the second is
        there; it is 1 if ``reducers`` is ``all``.
        """
        workspace = config.split_kind == "workspace"
        switch = [f"#define REDUCE_ALL {int(config.reducers == 'all')}"] if workspace else []
        return [f"#define SPLIT_WORKSPACE {int(workspace)}", *switch]

    def headers(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[str, str], ...]:
        return (("generated/wgmma_instance.cuh", wgmma_instance(config.bm if config.swap else config.bn, problem)),)

    def tensor_boxes(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[int, int, int, int], ...]:
        """Return (rows, cols, box rows, box cols) of the TMA descriptors of A, B and C, elements.

        B has the extents (N, K) for TN and (K, N) for NN. Example: M = 100, N = 200, K = 304, TN and tiles of 64 x 64
        give ``((100, 304, 64, 64), (200, 304, 64, 64), (100, 200, 64, 64))``.
        """
        epi_w, b_width = (int(self.geometry(problem, config).values[name]) for name in ("EPI_W", "B_WIDTH"))
        swap, (problem, config) = config.swap, self.as_computed(problem, config)
        rows = problem.m if config.fits_m else config.loaded_rows
        box_a = (problem.m, problem.k, rows // config.cluster_n, 64)
        if problem.layout == "TN":
            box_b = (problem.n, problem.k, config.bn // config.cluster_m, 64)
        else:
            box_b = (problem.k, problem.n, config.bk // config.cluster_m, b_width)
        if swap:
            return box_b, box_a, (problem.n, problem.m, epi_w, 64)
        return box_a, box_b, (problem.m, problem.n, min(64, rows), epi_w)

    def why_no_epilogue(self, config: Sm90WgmmaConfig) -> str | None:
        return "a kernel of the transpose has no epilogue but a stacked gate" if config.swap else None

    def why_not_stacked(self, problem: Problem, config: Sm90WgmmaConfig) -> str | None:
        """Return why a legal kernel cannot take the rows of gate and up by turns; None if it can.

        With ``swap`` it takes 8 of either at a time. So N, and the rows of each part of a tile that is multicast, must
        be multiples of 16. Without, a tile of B must not be multicast.
        """
        turn, part = 2 * SWAPPED_TURN, config.bn // config.cluster_m
        if not config.swap:
            return "its parts of a tile of B are multicast in the order of rows" if config.cluster_m > 1 else None
        if part % turn:
            return f"it multicasts {part} rows of B at a time, no multiple of {turn}"
        if problem.n % turn:
            return f"{problem.n} rows of B are no multiple of {turn}, as a kernel of the transpose needs"
        return None

    def rows_of_a_turn(self, config: Sm90WgmmaConfig) -> int:
        return SWAPPED_TURN if config.swap else 1


def _why_illegal_as_computed(p: Problem, c: Sm90WgmmaConfig, gpu: Gpu) -> str | None:
    """Return why a config in the kernel's own terms is illegal; None if it is legal."""
    if min(c.bm, c.bn, c.bk, c.stages, c.consumers, c.cluster_m, c.cluster_n, c.split_k, c.group, c.min_blocks) < 1:
        return "extents must be positive"
    pingpong = c.schedule == "pingpong"
    m_blocks = c.bm // 64 if pingpong else c.bm // 64 // c.consumers
    accumulators = m_blocks * c.bn // 2 // (2 if p.acc == "fp16" else 1)
    multicast = c.cluster_m * c.cluster_n
    workspace = c.split_kind == "workspace"
    rules = (
        (gpu.arch != 90, f"wgmma needs sm_90, not sm_{gpu.arch}"),
        (c.consumers not in (1, 2, 3), "consumers must be 1, 2 or 3"),
        (c.bm % 64 != 0 or not 64 <= c.bm <= 256, "bm must be 64, 128, 192 or 256"),
        (c.bn % 8 != 0 or not 8 <= c.bn <= 256, "bn must be a multiple of 8 up to 256"),
        (c.bk not in (64, 128), "bk must be 64 or 128"),
        (not 2 <= c.stages <= 16, "stages must be 2 to 16"),
        (not pingpong and c.bm // 64 % c.consumers != 0, "consumers do not divide bm / 64"),
        (pingpong and (c.consumers != 2 or not c.persistent), "pingpong needs 2 consumers and persistent"),
        (c.streams_c and c.store != "tma", f"{c.l2} needs TMA stores"),
        (c.schedule == "stagger" and c.consumers != 2, "stagger needs 2 consumers"),
        (multicast * c.cluster_split > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
        (c.split_k > 1 and (c.persistent or c.store == "tma"), "split_k stores directly and is not persistent"),
        (workspace and not 2 <= c.split_k <= MAX_WORKSPACE_SPLIT, "a workspace is for split_k 2 to 32"),
        (c.reducers == "all" and not workspace, "reducers=all needs a workspace"),
        (c.ctas != 0 and not c.persistent, "ctas is for persistent kernels"),
        (not 0 <= c.ctas <= gpu.sms or c.ctas % (multicast * c.cluster_split) != 0, "ctas must be whole clusters"),
        (
            c.loaded_rows % (8 * c.cluster_n) != 0 or c.bm // c.cluster_n > 256 or (c.fits_m and c.cluster_n > 1),
            "cluster_n does not slice the rows of A in a stage",
        ),
        (
            c.a_rows != 0 and (c.bm != 64 or not 7 <= c.a_rows < 64 or c.a_rows % 8 not in (0, 7)),
            "a_rows must be 0, or 7 to 63 with bm 64: a multiple of 8, or one less",
        ),
        (p.layout == "TN" and c.bn % (8 * c.cluster_m) != 0, "cluster_m does not slice bn"),
        (p.layout == "NN" and c.bk % (8 * c.cluster_m) != 0, "cluster_m does not slice bk"),
        (p.layout == "NN" and c.bn % 16 != 0, "NN needs bn a multiple of 16"),
        (not 1 <= c.min_blocks <= 4, "min_blocks must be 1 to 4"),
        (c.min_blocks > 1 and c.consumers > 1, "min_blocks above 1 needs one consumer"),
        (
            c.consumers == 3 and accumulators > MOST_OF_THREE,
            f"three consumers have at most {MOST_OF_THREE} accumulators each: ptxas gives 512 threads 128 registers",
        ),
    )
    for broken, reason in rules:
        if broken:
            return reason
    if c.cluster_split > 1:  # the owner's sums need registers beside the accumulators
        accumulators += (
            accumulators // divisor_up_to(max(1, m_blocks * c.bn // 8), c.split_k) + NON_ACCUMULATOR_REGISTERS // 2
        )
    budget = register_budget(c)
    if accumulators + NON_ACCUMULATOR_REGISTERS > budget:
        return (
            f"{accumulators} accumulator and sum registers, {NON_ACCUMULATOR_REGISTERS} others: the budget is {budget}"
        )
    return None


def _workspace_bytes(p: Problem, c: Any) -> Any:
    """Return the bytes of a workspace for a config, an integer, or for columns of configs, int64[configs]."""
    tiles_m = -(-p.m // (c.bm * c.cluster_m)) * c.cluster_m
    tiles_n = -(-p.n // (c.bn * c.cluster_n)) * c.cluster_n
    return COUNTERS_BYTES + tiles_m * tiles_n * c.split_k * c.bm * c.bn * 4


def register_budget(c: Sm90WgmmaConfig) -> int:
    """Return the registers that a consumer thread may use: 255, 232 or 152 for 1, 2 or 3 consumers.

    With ``min_blocks`` above 1 it depends on that only: 200 for 2, 136 for 3, 96 for 4.

    Raises:
        KeyError: another number of consumers with ``min_blocks=1``.
    """
    return min(255, CONSUMER_REGISTERS[c.consumers] if c.min_blocks == 1 else 65536 // c.min_blocks // 160 // 8 * 8)


def workspace_loads(c: Sm90WgmmaConfig) -> int:
    """Return the 16-byte loads in flight per thread of the CTA that sums the parts: as many as registers allow.

    It is 32, 16, 8 or 4. Examples: 32 for one or two consumers, 16 for three. The accumulators of that CTA are free by
    then.
    """
    room = register_budget(c) - NON_ACCUMULATOR_REGISTERS - 20
    return next((loads for loads in (32, 16, 8) if 4 * loads <= room), 4)
