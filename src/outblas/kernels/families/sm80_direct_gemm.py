"""The kernel family ``sm80_direct_gemm``: tiny products, with operands loaded from global memory straight to registers.

Its cost model is a chain of latencies, overlapped with the data that the SMs take in::

    time = launch (less with PDL) + rounds x (batches x (latency + products), or bytes / ingest) + epilogue + sums,
                                                                                     bounded below by the floor

A batch is ``unroll`` chunks of 32 of K that a warp loads at once. The next batch is requested when the last is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import (
    Columns,
    Floats,
    above_floor,
    admitted_ctas,
    ctas_on_busiest_sm,
    launch_us,
    smooth_max,
)
from outblas.kernels.families.family import Family
from outblas.kernels.geometry_terms import SM80_GROUP, Geometry, banded_grid, ceil_div

#: Registers per thread in addition to operands and sums (addresses, loop state).
DIRECT_REGISTERS = 60


@dataclass(frozen=True, order=True)
class Sm80DirectConfig(KernelConfig):
    """Knobs of ``sm80_direct_gemm``: tiny products, operands from global memory straight to registers.

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: rows of a C tile, elements; 16, 32 or 64 per warp along M.
        bn: columns of a C tile, elements; 8, 16 or 32 per warp along N.
        wm: warps along M.
        wn: warps along N.
        wk: warps along K; above 1, they split K inside the CTA. ``wm * wn * wk`` is at most 16.
        unroll: chunks of 32 of K that a warp loads before it multiplies, 1 to 8.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: needs pdl; the first loads of B do not wait for the predecessor.
        even: needs pdl; no SM gets more CTAs than an even distribution gives it.
    """

    family: ClassVar[str] = "sm80_direct_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "even")
    #: Elements per global load: 16 bytes.
    vec: ClassVar[int] = 8
    #: Elements of K that a quad of lanes loads at once.
    bk: ClassVar[int] = 32
    split_k: ClassVar[int] = 1
    bm: int
    bn: int
    wm: int = 1
    wn: int = 1
    wk: int = 1
    unroll: int = 2
    pdl: bool = False
    early: bool = False
    even: bool = False


class Sm80DirectGemm(Family[Sm80DirectConfig]):
    """The family ``sm80_direct_gemm``. ``FAMILIES["sm80_direct_gemm"]`` is its instance."""

    config = Sm80DirectConfig
    pool_place = 1
    residual_place = 2
    paired_stores = True
    start: ClassVar[Mapping[str, float]] = {
        "launch": 1.0, "launch_pdl": 0.5, "launch_early": 0.4, "latency_l2": 0.4, "latency_hbm": 0.7, "chunk": 0.03,
        "mma": 0.004, "ingest": 60e3, "l2": 5.0e6, "hbm": 4.2e6, "quantum": 0.5, "stacked": 0.3, "epilogue": 0.1,
        "warp_sum": 0.02, "exchange": 80e3,
    }  # fmt: skip

    def why_illegal(self, p: Problem, c: Sm80DirectConfig, gpu: Gpu) -> str | None:
        if min(c.bm, c.bn, c.wm, c.wn, c.wk, c.unroll) < 1:
            return "extents must be positive"
        m_blocks, n_blocks = c.bm // c.wm // 16, c.bn // c.wn // 8
        rules = (
            (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
            (c.bm % (16 * c.wm) != 0 or m_blocks not in (1, 2, 4), "bm / wm must be 16, 32 or 64"),
            (c.bn % (8 * c.wn) != 0 or n_blocks not in (1, 2, 4), "bn / wn must be 8, 16 or 32"),
            (c.wm * c.wn * c.wk > 16, "at most 16 warps"),
            (c.unroll > 8, "unroll must be 1 to 8"),
            (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
        )
        for broken, reason in rules:
            if broken:
                return reason
        held, budget = direct_registers(c)
        if held > budget:
            return (
                f"{held} registers of operands and sums: the budget is {budget} for {32 * c.wm * c.wn * c.wk} threads"
            )
        return None

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        return ((not p.rows_aligned, "rows are not multiples of 16 bytes"),)

    def geometry(self, problem: Problem, c: Sm80DirectConfig) -> Geometry:
        constants = {
            "BM": c.bm, "BN": c.bn, "WM": c.wm, "WN": c.wn, "WK": c.wk, "UNROLL": c.unroll, "GROUP": SM80_GROUP,
            "B_K_MAJOR": problem.layout == "TN", "PDL": c.pdl, "EARLY_B": c.early, "BF16": problem.dtype == "bf16",
        }  # fmt: skip
        return Geometry(
            threads=32 * c.wm * c.wn * c.wk,
            smem_bytes=c.bm * c.bn * 4 * c.wk if c.wk > 1 else 0,
            cluster=1,
            accumulators=max(1, c.bm // c.wm // 16 * (c.bn // c.wn // 8)) * (2 if problem.acc == "fp16" else 4),
            values=constants,
        )

    def grid(self, problem: Problem, config: Sm80DirectConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        return banded_grid(tiles_m, tiles_n, SM80_GROUP, config.split_k)

    def pool(self) -> Iterator[Sm80DirectConfig]:
        """Yield warp tiles of 16 to 32 by 8 to 32, with K in one warp or split over up to 16 warps, without PDL.

        ``bm`` and ``bn`` are the warp tile times ``wm`` and ``wn``. ``unroll`` is 1, 2 or 4. Kernels with too many
        registers are left out.
        """
        for (mt, nt), (wm, wn, wk) in product(
            ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4)),
            (
                (1, 1, 1),
                (1, 1, 2),
                (1, 1, 4),
                (1, 1, 8),
                (1, 1, 16),
                (1, 2, 1),
                (2, 1, 1),
                (2, 2, 1),
                (1, 2, 2),
                (1, 4, 1),
            ),
        ):
            for unroll in (1, 2, 4):
                config = Sm80DirectConfig(16 * mt * wm, 8 * nt * wn, wm, wn, wk, unroll)
                held, budget = direct_registers(config)
                if held <= budget and unroll * (8 * mt + 4 * nt) <= 96:
                    yield config

    def neighbours(self, problem: Problem, config: Sm80DirectConfig) -> Sequence[Iterable[Sm80DirectConfig]]:
        return [_one_knob_away(config)]

    def proof_shapes(self, problem: Problem, config: Sm80DirectConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        """Return three (M, N, K). K ends just after a round of all warps, inside the second round, or within one chunk.

        A round is ``wk * unroll * 32`` of K. The first shape is (9 bm + 1, bn + 8, round + 8). The last is (3, bn + 8,
        24).
        """
        bm, bn, bk = config.bm, config.bn, config.bk
        together = config.wk * config.unroll * bk
        return [(9 * bm + 1, bn + 8, together + 8), (bm - 1, 2 * bn - 8, 2 * together - 24), (3, bn + 8, bk - 8)]

    def registers(self, problem: Problem, config: Sm80DirectConfig, shape: Geometry) -> int:
        operands = config.unroll * (config.bm // config.wm // 2 + config.bn // config.wn // 2)
        return shape.accumulators + DIRECT_REGISTERS + operands

    def cost_columns(self, problem: Problem, config: Sm80DirectConfig, shape: Geometry) -> dict[str, Any]:
        return {"stages": config.unroll, "wm": config.wm, "wn": config.wn, "wk": config.wk, "vec": config.vec}

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        ctas = np.ceil(p["m"] / c["bm"]) * np.ceil(p["n"] / c["bn"])
        per_sm = admitted_ctas(c, ctas, gpu)
        slots = gpu.sms * per_sm
        full = ctas_on_busiest_sm(x, c, ctas, per_sm, gpu)
        active = np.minimum(ctas, slots)
        latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])

        chunks = np.ceil(np.ceil(p["k"] / c["bk"]) / c["wk"])
        batches = np.ceil(chunks / c["stages"])
        products = c["bm"] / c["wm"] / 16 * (c["bn"] / c["wn"] / 8) * 2
        tile_bytes = ELEMENT_BYTES * p["k"] * (c["bm"] + c["bn"])
        one_round = smooth_max(
            batches * latency + chunks * (x["chunk"] + products * x["mma"]),
            full * tile_bytes / x["ingest"],
            active * tile_bytes / x["l2"],
        )
        exact = np.maximum(ctas / slots, 1.0)
        rounds = exact + x["quantum"] * (np.ceil(exact) - exact)
        once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
        work = smooth_max(rounds * one_round, once / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
        sums = np.where(c["wk"] > 1, x["warp_sum"] * c["wk"] + 4 * c["bm"] * c["bn"] * c["wk"] / x["exchange"], 0.0)
        return above_floor(
            launch_us({**x, "cluster": 0.0, "cluster_log": 0.0}, c) + work + x["epilogue"] + sums, p["floor"]
        )


def direct_registers(c: Sm80DirectConfig) -> tuple[int, int]:
    """Return (registers of operands and fp32 sums per thread, allowed number of these).

    The config has too many if the first exceeds the second. Example: ``Sm80DirectConfig(16, 16)`` gives (40, 195).
    """
    m_blocks, n_blocks = c.bm // c.wm // 16, c.bn // c.wn // 8
    held = c.unroll * (8 * m_blocks + 4 * n_blocks) + 4 * m_blocks * n_blocks
    return held, min(255, 65536 // (32 * c.wm * c.wn * c.wk)) - DIRECT_REGISTERS


def _one_knob_away(c: Sm80DirectConfig) -> Iterator[Sm80DirectConfig]:
    """Yield configs that differ in one knob; some may be illegal."""
    for unroll in (c.unroll + 1, c.unroll - 1):
        yield replace(c, unroll=unroll)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, wk=c.wk // 2)
    yield replace(c, wk=c.wk + 1)
    yield replace(c, bn=2 * c.bn)
    yield replace(c, bn=c.bn // 2)
    yield replace(c, bm=2 * c.bm)
    yield replace(c, bm=c.bm // 2)


FAMILY = Sm80DirectGemm()
