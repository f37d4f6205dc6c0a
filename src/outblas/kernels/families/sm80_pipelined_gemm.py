"""The kernel family ``sm80_pipelined_gemm``: large tiles of mma.sync, fed by a ring of cp.async stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.cost.tiled import tiled_us
from outblas.kernels.families import sm80_pipelined_cost as cost
from outblas.kernels.families import sm80_pipelined_pool as pool
from outblas.kernels.families.family import Family
from outblas.kernels.families.sm80_pipelined_config import Sm80PipelinedConfig
from outblas.kernels.geometry_terms import (
    COUNTERS_BYTES,
    SM_REGISTERS,
    WORKSPACE_LIMIT,
    Geometry,
    banded_grid,
    ceil_div,
    split_workspace_bytes,
)

__all__ = ["FAMILY", "Sm80PipelinedConfig", "Sm80PipelinedGemm"]

#: Maximum parts of K.
MAX_SPLIT = 32
#: Maximum rows or columns of a tile, and warps of a CTA.
MAX_TILE, MAX_WARPS = 256, 16
#: Bytes of a tile's counter in the workspace (pipelined/part_sums.cuh).
COUNTER_BYTES = 4


class Sm80PipelinedGemm(Family[Sm80PipelinedConfig]):
    """The family ``sm80_pipelined_gemm``. ``FAMILIES["sm80_pipelined_gemm"]`` is its instance."""

    config = Sm80PipelinedConfig
    without_wgmma = True
    any_alignment = "vec=1"
    start: ClassVar[Mapping[str, float]] = cost.START
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
        need = cost.registers(c, cost.accumulator_registers(c, p.acc == "fp16"))
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
            "BM": c.bm,
            "BN": c.bn,
            "BK": c.bk,
            "STAGES": c.stages,
            "WM": c.wm,
            "WN": c.wn,
            "SPLIT": c.split_k,
            "VEC": c.vec,
            "GROUP": c.group,
            "PERSISTENT": c.persistent,
            "MIN_BLOCKS": c.min_blocks,
            "B_K_MAJOR": problem.layout == "TN",
            "PDL": c.pdl,
            "EARLY_B": c.early,
            "BF16": problem.dtype == "bf16",
        }
        if c.split_k > 1:
            constants["COUNTERS_BYTES"] = COUNTERS_BYTES
        ring = c.stages * c.bk * (c.bm + c.bn) * ELEMENT_BYTES
        slabs = c.wm * 16 * c.bn * ELEMENT_BYTES  # 16 rows of each warp
        return Geometry(
            threads=c.threads,
            smem_bytes=ring + slabs if c.persistent else max(ring, slabs),
            cluster=1,
            accumulators=cost.accumulator_registers(c, problem.acc == "fp16"),
            values=constants,
        )

    def grid(self, problem: Problem, config: Sm80PipelinedConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        if config.persistent:
            return min(tiles_m * tiles_n, sms * config.min_blocks), 1, 1
        x, y, z = banded_grid(tiles_m, tiles_n, config.group, 1)
        return x, y, z * config.split_k

    def min_blocks(self, config: Sm80PipelinedConfig) -> int:
        return config.min_blocks

    def workspace_bytes(self, problem: Problem, config: Sm80PipelinedConfig) -> int:
        return split_workspace_bytes(problem, config) if config.split_k > 1 else 0

    def source_lines(self, config: Sm80PipelinedConfig) -> Sequence[str]:
        """Return the switch of the workspace, one more kernel parameter: ``["#define SPLIT_WORKSPACE 0"]`` or 1."""
        return [f"#define SPLIT_WORKSPACE {int(config.split_k > 1)}"]

    def alignment(self, config: Sm80PipelinedConfig) -> int:
        return config.vec * ELEMENT_BYTES

    def pool(self) -> Iterator[Sm80PipelinedConfig]:
        return pool.pool()

    def neighbours(self, problem: Problem, config: Sm80PipelinedConfig) -> Sequence[Iterable[Sm80PipelinedConfig]]:
        return pool.neighbours(config)

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[Sm80PipelinedConfig]:
        return pool.candidates(problem, gpu)

    def unaligned_candidates(
        self, problem: Problem, gpu: Gpu, listed: Sequence[Sm80PipelinedConfig]
    ) -> Iterable[Sm80PipelinedConfig]:
        return pool.unaligned_candidates(problem, gpu, listed)

    def transposed(self, config: Sm80PipelinedConfig) -> Sm80PipelinedConfig:
        return pool.transposed(config)

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
        return cost.registers(config, shape.accumulators)

    def cost_columns(self, problem: Problem, config: Sm80PipelinedConfig, shape: Geometry) -> dict[str, Any]:
        return cost.columns(config)

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        return tiled_us(cost.COST, x, p, c, gpu)


FAMILY = Sm80PipelinedGemm()
