"""The kernel family ``sm80_mma_gemm``: cp.async in several stages, ldmatrix and mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats, cluster_split, smooth_max
from outblas.kernels.cost.tiled import TiledCost
from outblas.kernels.families.family import Family, Summation
from outblas.kernels.geometry_terms import MAX_CLUSTER, SM80_GROUP, Geometry, banded_grid, ceil_div, warp_sums

#: Registers per thread in addition to accumulators: operand fragments and addresses.
NON_ACCUMULATOR_REGISTERS = 70

#: Accumulators and unrolled loads per thread of kernels with narrow loads, at most: with more of them, some spill.
MAX_NARROW_SUMS, MAX_NARROW_LOADS = 64, 36


@dataclass(frozen=True, order=True)
class Sm80MmaConfig(KernelConfig):
    """Knobs of ``sm80_mma_gemm``: cp.async multistage, ldmatrix, mma.sync.

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: rows of a C tile, elements; a multiple of 16 ``wm``.
        bn: columns of a C tile, elements; a multiple of 16 ``wn``.
        bk: depth of one stage, elements of K: 32, 64, 128 or 256.
        stages: depth of the cp.async pipeline, 1 to 8.
        wm: warps along M.
        wn: warps along N.
        wk: warps along K; above 1, they split every stage's K inside the CTA.
        split_k: CTAs of a cluster that share one tile's K (sm_90 only); they sum through distributed shared memory.
        vec: elements per global load. 8, 4, 2: cp.async of 16, 8, 4 bytes. 1: predicated scalar loads, for rows of any
            alignment.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: needs pdl; the first loads of B do not wait for the predecessor.
        even: needs pdl; no SM gets more CTAs than an even distribution gives it
            (:func:`outblas.kernels.geometry.launch_smem`). The machine code is the same.
    """

    family: ClassVar[str] = "sm80_mma_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "even")
    bm: int
    bn: int
    bk: int = 64
    stages: int = 3
    wm: int = 2
    wn: int = 2
    wk: int = 1
    split_k: int = 1
    vec: int = 8
    pdl: bool = False
    early: bool = False
    even: bool = False


class Sm80MmaGemm(TiledCost, Family[Sm80MmaConfig]):
    """The family ``sm80_mma_gemm``. ``FAMILIES["sm80_mma_gemm"]`` is its instance."""

    config = Sm80MmaConfig
    pool_place = 0
    residual_place = 1
    any_alignment = "vec=1"
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"vec": (1, 2, 4, 8)}
    start: ClassVar[Mapping[str, float]] = {
        "launch": 0.9, "launch_pdl": 0.5, "launch_early": 0.3, "cluster": 0.1, "cluster_log": 0.05,
        "latency_l2": 0.3, "latency_hbm": 0.8, "loaded_l2": 0.4, "loaded_hbm": 0.4, "queue": 3e7, "apart": 1.5,
        "stacked": 0.3, "clock": 1.6, "issue": 30.0, "stage": 60.0, "copy": 4.0, "ingest": 60e3, "l2": 5.0e6,
        "hbm": 3.8e6, "cache": 30e6, "wave": 0.2, "quantum": 0.9, "epilogue_direct": 0.2, "store_direct": 40e3,
        "split": 0.4, "split_peer": 0.03, "exchange": 50e3,
    }  # fmt: skip

    def why_illegal(self, p: Problem, c: Sm80MmaConfig, gpu: Gpu) -> str | None:
        if min(c.bm, c.bn, c.bk, c.wm, c.wn, c.wk, c.stages, c.split_k, c.vec) < 1:
            return "extents must be positive"
        rules = (
            (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
            (c.bm % (16 * c.wm) != 0, "wm does not divide bm / 16"),
            (c.bn % (16 * c.wn) != 0, "wn does not divide bn / 16"),
            (c.bk % (16 * c.wk) != 0, "wk does not divide bk / 16"),
            (c.bk not in (32, 64, 128, 256), "bk must be 32, 64, 128 or 256"),
            (c.wm * c.wn * c.wk > 16, "at most 16 warps"),
            (not 1 <= c.stages <= 8, "stages must be 1 to 8"),
            (c.vec not in (1, 2, 4, 8), "vec must be 1, 2, 4 or 8"),
            (c.split_k > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
            (c.split_k > 1 and gpu.arch != 90, "cluster split-K needs sm_90"),
            (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
            (c.early and c.vec == 1, "early needs vec above 1: scalar loads wait for themselves"),
            (p.layout == "NN" and c.bn not in (16, 32, 64, 128, 256), "NN needs bn a power of two"),
        )
        for broken, reason in rules:
            if broken:
                return reason
        accumulators = (c.bm // c.wm) * (c.bn // c.wn) // 32
        threads = 32 * c.wm * c.wn * c.wk
        if accumulators + NON_ACCUMULATOR_REGISTERS > min(255, 65536 // threads):
            return f"{accumulators} accumulator registers are too many for {threads} threads"
        return None

    def summation(self, config: Sm80MmaConfig) -> Summation | None:
        """Return ``mma``, or None if CTAs or warps share K."""
        return "mma" if config.split_k == config.wk == 1 else None

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        unaligned = (p.k % c.vec != 0) | (p.b_shape[1] % c.vec != 0)
        return ((unaligned, "rows are not multiples of vec = {c.vec} elements"),)

    def geometry(self, problem: Problem, c: Sm80MmaConfig) -> Geometry:
        units = max(1, (c.bm // c.wm // 16) * (c.bn // c.wn // 8))
        stages = c.stages * c.bk * (c.bm + c.bn) * ELEMENT_BYTES
        sums = warp_sums(units, c.wm * c.wn, c.wk, c.split_k, stages)
        constants = {
            "BM": c.bm, "BN": c.bn, "BK": c.bk, "STAGES": c.stages, "WM": c.wm, "WN": c.wn, "WK": c.wk,
            "SPLIT": c.split_k, "WARP_OWNERS": sums.warp_owners, "OWNERS": sums.owners, "GROUP": SM80_GROUP,
            "VEC": c.vec, "B_K_MAJOR": problem.layout == "TN", "PDL": c.pdl, "EARLY_B": c.early,
            "BF16": problem.dtype == "bf16",
        }  # fmt: skip
        return Geometry(
            threads=32 * c.wm * c.wn * c.wk, smem_bytes=sums.smem_bytes, cluster=c.split_k,
            accumulators=units * (2 if problem.acc == "fp16" else 4), values=constants,
        )  # fmt: skip

    def grid(self, problem: Problem, config: Sm80MmaConfig, sms: int) -> tuple[int, int, int]:
        tiles_m, tiles_n = ceil_div(problem.m, config.bm), ceil_div(problem.n, config.bn)
        return banded_grid(tiles_m, tiles_n, SM80_GROUP, config.split_k)

    def why_not_stacked(self, problem: Problem, config: Sm80MmaConfig) -> str | None:
        return None

    def pool(self) -> Iterator[Sm80MmaConfig]:
        """Yield tiles of mma.sync with K split over warps and over clusters, without PDL.

        All 15 tiles come with ``split_k=1``. Those of at most 64 x 32 elements also come with 2, 4, 8 and 16.
        """
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

    def neighbours(self, problem: Problem, config: Sm80MmaConfig) -> Sequence[Iterable[Sm80MmaConfig]]:
        return [_one_knob_away(config)]

    def special_candidates(self, problem: Problem, gpu: Gpu) -> tuple[Sm80MmaConfig, ...]:
        """Return the tiles of a GPU without wgmma, on which this family computes the large products, too.

        They are those of the pool and larger ones, up to 256 x 128 and 128 x 256. Each comes without PDL, then from
        sm_90 on with PDL. With wgmma the result is empty.
        """
        if gpu.wgmma_tflops > 0:
            return ()
        tiles = dict.fromkeys((*_large_tiles(), *(config for config in self.pool() if config.split_k == 1)))
        options = (False, True) if gpu.arch >= 90 else (False,)
        return tuple(replace(config, pdl=pdl) for config in tiles for pdl in options)

    def unaligned_candidates(
        self, problem: Problem, gpu: Gpu, listed: Sequence[Sm80MmaConfig]
    ) -> Iterable[Sm80MmaConfig]:
        """Yield the tiles of the catalogue and of the pool, with the widest loads that the rows allow.

        ``vec`` is the largest of 8, 4, 2 and 1 that divides K and the row length of B as stored. Each config comes
        without PDL, then with PDL. Below sm_90 it comes twice without PDL.
        """
        vec = _widest_loads(problem)
        for config in (*listed, *self.pool()):
            for pdl in (False, gpu.arch >= 90):
                yield replace(config, vec=vec, pdl=pdl)

    def fixed_order_candidates(self, problem: Problem) -> Iterator[Sm80MmaConfig]:
        """Yield tiles whose K no warps share, from 16 x 16 up, with the widest loads that the rows allow, without PDL.

        One of them is legal for every problem, whatever the alignment of its rows. Kernels of narrow loads that would
        spill are left out: each load is unrolled.
        """
        vec = _widest_loads(problem)
        small = (Sm80MmaConfig(*tile[:2], bk, 4, *tile[2:]) for tile in _SMALL_TILES for bk in _SMALL_DEPTHS)
        for config in (*small, *_large_tiles()):
            threads = 32 * config.wm * config.wn
            sums, loads = config.bm * config.bn // threads, (config.bm + config.bn) * config.bk // threads // vec
            if vec == 8 or (sums <= MAX_NARROW_SUMS and loads <= MAX_NARROW_LOADS):
                yield replace(config, vec=vec)

    def proof_shapes(self, problem: Problem, config: Sm80MmaConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        return [(33, 2 * config.bn - 2, 2 * config.bk + 2)]

    def registers(self, problem: Problem, config: Sm80MmaConfig, shape: Geometry) -> int:
        return shape.accumulators + NON_ACCUMULATOR_REGISTERS

    def cost_columns(self, problem: Problem, config: Sm80MmaConfig, shape: Geometry) -> dict[str, Any]:
        return {"stages": config.stages, "wm": config.wm, "wn": config.wn, "wk": config.wk, "vec": config.vec}

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        mma.sync does at most 1,024 multiply-adds a cycle. Every warp reads its own operands by ldmatrix, and the same
        warps issue the cp.async instructions.
        """
        warps = c["wm"] * c["wn"] * c["wk"]
        math_cycles = c["bm"] * c["bn"] * c["bk"] / 1024
        read_cycles = warps * (c["bm"] / c["wm"] + c["bn"] / c["wn"]) * (c["bk"] / c["wk"]) * ELEMENT_BYTES / 128
        copies = (c["bm"] + c["bn"]) * c["bk"] / c["vec"] / 32
        serial = x["stage"] + x["issue"] * c["bk"] / 16 / c["wk"] + x["copy"] * copies / warps
        cycles = smooth_max(math_cycles, read_cycles + x["copy"] * copies / 4)
        return cycles / (x["clock"] * 1e3), serial / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        tile_bytes = ELEMENT_BYTES * c["bm"] * c["bn"]
        direct = x["epilogue_direct"] + tile_bytes / cluster_split(c) / x["store_direct"]
        return direct + 2 * tile_bytes * (c["wk"] - 1) / x["exchange"]  # warps that split K sum in shared memory


#: (bm, bn, wm, wn) of tiles for few rows or columns, of which each warp has all K.
_SMALL_TILES = (
    *((16, 16, 1, 1), (16, 32, 1, 2), (16, 64, 1, 4), (16, 128, 1, 8), (32, 32, 1, 2), (32, 64, 1, 4), (32, 64, 2, 2)),
    *((32, 128, 2, 4), (64, 16, 4, 1), (64, 32, 2, 2), (64, 64, 2, 2), (128, 16, 8, 1), (128, 32, 4, 2)),
)
#: Their bk.
_SMALL_DEPTHS = (32, 64, 128)
#: (bm, bn, wm, wn) of tiles for large products: warps of 64 x 64, 64 x 32 and 32 x 64.
_LARGE_TILES = (
    *((256, 128, 4, 2), (128, 256, 2, 4), (256, 64, 4, 1), (64, 256, 1, 4), (128, 128, 2, 2), (128, 128, 2, 4)),
    *((128, 128, 4, 2), (128, 64, 2, 1), (128, 64, 2, 2), (64, 128, 1, 2), (64, 128, 2, 2), (64, 64, 2, 2)),
)
#: Their (bk, stages).
_LARGE_DEPTHS = ((32, 3), (32, 4), (32, 6), (64, 2), (64, 3), (64, 4))


def _widest_loads(problem: Problem) -> int:
    """Return the largest ``vec`` that divides K and the row length of B as stored."""
    return next(v for v in (8, 4, 2, 1) if problem.k % v == 0 and problem.b_shape[1] % v == 0)


def _large_tiles() -> Iterator[Sm80MmaConfig]:
    """Yield the tiles for large products; the legality predicate drops those that need too much shared memory."""
    for bm, bn, wm, wn in _LARGE_TILES:
        for bk, stages in _LARGE_DEPTHS:
            yield Sm80MmaConfig(bm, bn, bk, stages, wm, wn)


def _one_knob_away(c: Sm80MmaConfig) -> Iterator[Sm80MmaConfig]:
    """Yield configs that differ in one knob; some may be illegal."""
    yield replace(c, stages=c.stages + 1)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, split_k=2 * c.split_k)
    yield replace(c, split_k=c.split_k // 2)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, bk=2 * c.bk)
    yield replace(c, bk=c.bk // 2)


FAMILY = Sm80MmaGemm()
