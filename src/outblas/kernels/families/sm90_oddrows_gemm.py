"""The kernel family ``sm90_oddrows_gemm``: TMA and wgmma for rows that are no multiples of 16 bytes.

TMA wants rows whose distance is a multiple of 16 bytes. Every eighth row of any matrix has such a distance. So A and B
have eight TMA maps each, one for each remainder of the row's number by eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.cost.tiled import tiled_us
from outblas.kernels.families import sm90_oddrows_cost as cost
from outblas.kernels.families import sm90_oddrows_pool as pool
from outblas.kernels.families.family import Family
from outblas.kernels.families.sm90_oddrows_config import Sm90OddrowsConfig
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.geometry_terms import (
    COMBS,
    COUNTERS_BYTES,
    WGMMA_ROWS,
    WORKSPACE_LIMIT,
    Geometry,
    banded_grid,
    ceil_div,
    split_workspace_bytes,
)

__all__ = ["FAMILY", "Sm90OddrowsConfig", "Sm90OddrowsGemm"]

#: Elements of a box's row (combs/maps.cuh).
SPAN = 64
#: Maximum parts of K, and bytes of a tile's counter in the workspace.
MAX_SPLIT, COUNTER_BYTES = 32, 4


class Sm90OddrowsGemm(Family[Sm90OddrowsConfig]):
    """The family ``sm90_oddrows_gemm``. ``FAMILIES["sm90_oddrows_gemm"]`` is its instance."""

    config = Sm90OddrowsConfig
    for_unaligned_rows = True
    instructions = "wgmma"
    combs = COMBS
    start: ClassVar[Mapping[str, float]] = cost.START
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
        need, budget = cost.registers(p, c), cost.register_budget(c)
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
            "BM": c.bm,
            "BN": c.bn,
            "BK": c.bk,
            "A_ROWS": c.loaded_rows,
            "STAGES": c.stages,
            "CONSUMERS": c.consumers,
            "SPLIT": c.split_k,
            "GROUP": c.group,
            "MIN_BLOCKS": c.min_blocks,
            "PRODUCER_REGS": 56,
            "CONSUMER_REGS": 224,
            "PDL": c.pdl,
            "EARLY_B": c.early,
            "N_MAJOR": problem.layout == "NN",
            "BF16": problem.dtype == "bf16",
        }
        if c.split_k > 1:
            constants["COUNTERS_BYTES"] = COUNTERS_BYTES
        stage = c.bk * (c.loaded_rows + c.bn) * ELEMENT_BYTES
        read = (c.stages - 1) * stage + 2 * SPAN * ((c.bk // SPAN - 1) * c.loaded_rows + max(WGMMA_ROWS, c.loaded_rows))
        return Geometry(
            threads=c.threads,
            smem_bytes=max(c.stages * stage, read, c.bm * c.bn * ELEMENT_BYTES) + 16 * c.stages,
            cluster=1,
            accumulators=cost.accumulators(c),
            values=constants,
        )

    def grid(self, problem: Problem, config: Sm90OddrowsConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        x, y, z = banded_grid(tiles_m, tiles_n, config.group, 1)
        return x, y, z * config.split_k

    def min_blocks(self, config: Sm90OddrowsConfig) -> int:
        return config.min_blocks

    def workspace_bytes(self, problem: Problem, config: Sm90OddrowsConfig) -> int:
        return split_workspace_bytes(problem, config) if config.split_k > 1 else 0

    def source_lines(self, config: Sm90OddrowsConfig) -> Sequence[str]:
        """Return the switch of the workspace, one more kernel parameter: ``["#define SPLIT_WORKSPACE 0"]`` or 1."""
        return [f"#define SPLIT_WORKSPACE {int(config.split_k > 1)}"]

    def headers(self, problem: Problem, config: Sm90OddrowsConfig) -> tuple[tuple[str, str], ...]:
        """Return the header of the wgmma instruction."""
        return (("generated/wgmma_instance.cuh", wgmma_instance(config.bn, problem)),)

    def tensor_boxes(self, problem: Problem, config: Sm90OddrowsConfig) -> tuple[tuple[int, int, int, int], ...]:
        rows = config.loaded_rows // COMBS
        rows_b = config.bn if problem.layout == "TN" else SPAN
        return (problem.m, problem.k, rows, SPAN), (*problem.b_shape, rows_b // COMBS, SPAN)

    def alignment(self, config: Sm90OddrowsConfig) -> int:
        return ROW_ALIGN_BYTES

    def why_no_epilogue(self, config: Sm90OddrowsConfig) -> str | None:
        return "a kernel for rows of any length has no epilogue"

    def pool(self) -> Iterator[Sm90OddrowsConfig]:
        return pool.pool()

    def neighbours(self, problem: Problem, config: Sm90OddrowsConfig) -> Sequence[Iterable[Sm90OddrowsConfig]]:
        return pool.neighbours(config)

    def unaligned_candidates(
        self, problem: Problem, gpu: Gpu, listed: Sequence[Sm90OddrowsConfig]
    ) -> Iterable[Sm90OddrowsConfig]:
        return pool.candidates(problem, gpu)

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
        return cost.allotted_registers(problem, config)

    def cost_columns(self, problem: Problem, config: Sm90OddrowsConfig, shape: Geometry) -> dict[str, Any]:
        return cost.columns(config)

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        return tiled_us(cost.COST, x, p, c, gpu)


FAMILY = Sm90OddrowsGemm()
