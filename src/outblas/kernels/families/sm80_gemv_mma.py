"""The kernel family ``sm80_gemv_mma``: at most 16 rows of A, bound by the reading of B.

Its cost model is the rate at which weights stream, plus fixed parts::

    time = launch (less with PDL) + cluster set-up + fill latency
         + the larger of: rounds x (smooth max of: latency chain, SM ingest, L2 share), bytes / HBM
         + epilogue and sums,                                            bounded below by the floor

The latency chain of a CTA is (its bytes / bytes in flight) x latency. Steps in registers are all awaited at once,
because ptxas gives loads across the loop's back edge one scoreboard. So only the share ``duty`` of them counts, or all
if tokens are kept in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Layout, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import (
    Columns,
    Floats,
    above_floor,
    ctas_on_busiest_sm,
    launch_us,
    resident_ctas,
    smooth_max,
    split_us,
)
from outblas.kernels.families.family import CacheHint, Family
from outblas.kernels.geometry_terms import (
    CTA_SMEM,
    MAX_CLUSTER,
    SM_REGISTERS,
    SM_SMEM,
    SM_THREADS,
    Geometry,
    ceil_div,
    warp_sums,
)

Ring = Literal["registers", "shared"]
#: Registers per thread in addition to operands and sums (loads have addresses and predicates).
GEMV_REGISTERS = 60
#: The same for CTAs that walk over tiles: ptxas is limited so that :func:`gemv_blocks_per_sm` CTAs share an SM.
GEMV_WALK_REGISTERS = {"TN": 40, "NN": 52}
#: The same number in the cost model.
_MODEL_REGISTERS = 56
#: Maximum K whose tokens are kept in shared memory, or that warms L2.
MAX_KEPT_K = 65536
#: Maximum rows of A.
MAX_GEMV_ROWS = 16
#: Values of kept_k that are tried.
KEPT_K_CHOICES = (2048, 4096, 8192)


@dataclass(frozen=True, order=True)
class Sm80GemvConfig(KernelConfig):
    """Knobs of ``sm80_gemv_mma``: at most 16 rows of A (tokens), bound by the reading of B (weights).

    The constructor checks nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        bm: capacity for tokens, 8 or 16; M may not exceed it.
        bn: weight rows (columns of C) of a CTA. ``bn / wn`` is 16, 32, 64 or 128 for TN, 64 or 128 for NN.
        wn: warps side by side along bn.
        wk: warps that share the K of the same rows.
        unroll: steps in flight per warp; a step is 64 of K for TN, 32 for NN.
        ring: place of these steps: ``registers``, or ``shared`` memory (cp.async).
        split_k: CTAs of a cluster that share K (sm_90 only); they sum through distributed shared memory.
        prefetch: bytes that a miss brings into L2, 128 or 256.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: needs pdl; the first loads of B do not wait for the predecessor.
        persistent: only the resident CTAs are launched, and they walk over the tiles. False: one CTA per tile.
        l2: L2 hint: ``plain``, or ``stream_b``: B is read once.
        kept_k: needs persistent. Up to this K, a CTA keeps its tokens in shared memory. 0: it reads them per tile.
        warm_k: needs early. This much of K beyond the ring is prefetched into L2 while a CTA waits for its predecessor.
    """

    family: ClassVar[str] = "sm80_gemv_mma"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "persistent", "l2", "kept_k", "warm_k")
    launch_knobs: ClassVar[tuple[str, ...]] = (*KernelConfig.launch_knobs, "warm_k")
    #: Elements per global load: 16 bytes.
    vec: ClassVar[int] = 8
    #: Depth of K in whole steps of either layout.
    bk: ClassVar[int] = 64
    bm: int
    bn: int
    wn: int = 1
    wk: int = 8
    unroll: int = 4
    ring: Ring = "registers"
    split_k: int = 1
    prefetch: int = 256
    pdl: bool = False
    early: bool = False
    persistent: bool = False
    l2: CacheHint = "plain"
    kept_k: int = 0
    warm_k: int = 0


class Sm80GemvMma(Family[Sm80GemvConfig]):
    """The family ``sm80_gemv_mma``, for M up to 16. ``FAMILIES["sm80_gemv_mma"]`` is its instance."""

    config = Sm80GemvConfig
    pool_place = 3
    offer_place = 0
    residual_place = 3
    few_rows_only = True
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"kept_k": KEPT_K_CHOICES, "prefetch": (128, 256)}
    start: ClassVar[Mapping[str, float]] = {
        "launch": 1.2, "launch_pdl": 0.9, "launch_early": 0.5, "cluster": 0.08, "cluster_log": 0.06,
        "latency_l2": 0.5, "latency_hbm": 0.7, "duty": 0.65, "ingest": 80e3, "l2": 6.0e6, "hbm": 4.2e6,
        "quantum": 0.5, "stacked": 0.3, "epilogue": 0.3, "exchange": 80e3, "split": 0.2, "split_peer": 0.05,
    }  # fmt: skip

    def why_illegal(self, p: Problem, c: Sm80GemvConfig, gpu: Gpu) -> str | None:
        if min(c.bm, c.bn, c.wn, c.wk, c.unroll, c.split_k) < 1:
            return "extents must be positive"
        rows, k_major = c.bn // c.wn, p.layout == "TN"
        rules = (
            (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
            (p.acc != "fp32", f"sums are kept in fp32, not {p.acc}"),
            (c.bm not in (8, 16), "bm must be 8 or 16"),
            (c.bn % c.wn != 0, "wn does not divide bn"),
            (k_major and rows not in (16, 32, 64, 128), "TN needs bn / wn of 16, 32, 64 or 128 rows per warp"),
            (not k_major and rows not in (64, 128), "NN needs bn / wn of 64 or 128 rows per warp (16-byte loads)"),
            (c.wn * c.wk > 16, "at most 16 warps"),
            (c.unroll > 8, "unroll must be 1 to 8"),
            (c.prefetch not in (128, 256), "prefetch must be 128 or 256"),
            (c.split_k > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
            (c.split_k > 1 and gpu.arch != 90, "cluster split-K needs sm_90"),
            (c.split_k > 1 and c.persistent, "split_k is not persistent"),
            (c.l2 not in ("plain", "stream_b"), f"{c.l2} is not for this family: plain or stream_b"),
            # ptxas 13.0 encodes this cp.async with a policy in half a register pair: an illegal instruction on the GPU.
            (c.l2 != "plain" and c.ring == "shared", f"{c.l2} needs the ring in registers: cp.async takes no hint"),
            (c.kept_k > 0 and not c.persistent, "kept_k needs persistent"),
            (not 0 <= c.kept_k <= MAX_KEPT_K, f"kept_k must be 0 to {MAX_KEPT_K}"),
            (c.warm_k > 0 and not c.early, "warm_k needs early"),
            (c.warm_k > 0 and not k_major, "warm_k needs K-major weights (TN)"),
            (
                c.warm_k % c.vec != 0 or not 0 <= c.warm_k <= MAX_KEPT_K,
                f"warm_k must be a multiple of 8 up to {MAX_KEPT_K}",
            ),
            (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
        )
        if reason := next((text for broken, text in rules if broken), None):
            return reason
        held = gemv_held_registers(p, c)
        others = GEMV_WALK_REGISTERS[p.layout] if c.kept_k else GEMV_REGISTERS  # kept tokens need no addresses
        budget = min(255, 65536 // (32 * c.wn * c.wk))
        if held + others > budget:
            return f"{held} registers of operands and sums, {others} others: the budget is {budget}"
        return None

    def extent_rules(self, p: Problem, c: Any) -> Sequence[tuple[Any, str]]:
        unaligned = p.k % self.config.vec != 0 or p.b_shape[1] % self.config.vec != 0
        return (
            (p.m > c.bm, "M = {p.m} exceeds the {c.bm} tokens of the kernel"),
            (unaligned, f"rows are not multiples of vec = {self.config.vec} elements"),
            ((c.kept_k > 0) & (c.kept_k < p.k), "K = {p.k} exceeds the kept_k of the kernel"),
        )

    def geometry(self, problem: Problem, c: Sm80GemvConfig) -> Geometry:
        units = max(1, c.bn // c.wn // 16) * (c.bm // 8)
        threads = 32 * c.wn * c.wk
        sums = warp_sums(units, c.wn, c.wk, c.split_k, gemv_ring_bytes(problem, c))
        constants = {
            "BM": c.bm,
            "BN": c.bn,
            "WN": c.wn,
            "WK": c.wk,
            "UNROLL": c.unroll,
            "RING_SHARED": c.ring == "shared",
            "SPLIT": c.split_k,
            "WARP_OWNERS": sums.warp_owners,
            "OWNERS": sums.owners,
            "PREFETCH": c.prefetch,
            "STREAM_B": c.l2 == "stream_b",
            "PERSISTENT": c.persistent,
            "WARM_K": c.warm_k,
            "KEPT_STEPS": gemv_kept_steps(problem, c),
            "MIN_BLOCKS": gemv_blocks_per_sm(problem, c) if c.persistent else 0,
            "B_K_MAJOR": problem.layout == "TN",
            "PDL": c.pdl,
            "EARLY_B": c.early,
            "BF16": problem.dtype == "bf16",
        }
        return Geometry(
            threads=threads, smem_bytes=gemv_walk_smem(problem, c) if c.persistent else sums.smem_bytes,
            cluster=c.split_k, accumulators=4 * units, values=constants,
        )  # fmt: skip

    def grid(self, problem: Problem, config: Sm80GemvConfig, sms: int) -> tuple[int, int, int]:
        tiles = ceil_div(problem.n, config.bn)
        resident = sms * gemv_blocks_per_sm(problem, config)
        return min(tiles, resident) if config.persistent else config.split_k * tiles, 1, 1

    def k_tiles(self, problem: Problem, config: Sm80GemvConfig) -> int:
        return ceil_div(problem.k, gemv_step(problem.layout))

    def without_early(self, config: Sm80GemvConfig) -> Sm80GemvConfig:
        return replace(config, early=False, warm_k=0)

    def why_not_stacked(self, problem: Problem, config: Sm80GemvConfig) -> str | None:
        return None

    def pool(self) -> Iterator[Sm80GemvConfig]:
        """Yield kernels without PDL: 16 weight rows per CTA (many CTAs) to 128 (tokens are read less often)."""
        for bn, wn, wk, unroll, ring in (
            *((16, 1, 8, 4, "registers"), (16, 1, 4, 4, "registers")),
            *((32, 1, 8, 2, "registers"), (32, 2, 4, 4, "registers")),
            *((64, 1, 8, 2, "registers"), (64, 1, 4, 2, "registers")),
            *((128, 2, 4, 2, "registers"), (16, 1, 8, 4, "shared")),
            *((16, 1, 4, 6, "shared"), (32, 1, 8, 2, "shared")),
            *((32, 1, 8, 3, "shared"), (32, 1, 4, 4, "shared")),
            *((64, 4, 2, 4, "shared"), (64, 2, 4, 4, "shared"), (64, 1, 4, 2, "shared"), (64, 1, 8, 2, "shared")),
            *((128, 2, 4, 2, "shared"), (128, 2, 4, 4, "shared")),
        ):
            for bm, split in product((8, 16), (1, 2, 4, 8)):
                if split < 8 or bn >= 64:
                    yield Sm80GemvConfig(bm, bn, wn, wk, unroll, ring, split)  # type: ignore[arg-type]
        # Walking CTAs: tokens through L1, or kept up to the K for which shared memory has room.
        for bm, bn, wk, unroll, ring, kept_k in (
            *((bm, 16, 8, 4, "registers", kept_k) for bm in (8, 16) for kept_k in (0, 4096)),
            *((bm, 16, 4, 4, "registers", 2048) for bm in (8, 16)),
            (8, 16, 16, 4, "registers", 8192),
            (16, 16, 16, 4, "registers", 4096),
            *((bm, 16, 8, 4, "shared", 0) for bm in (8, 16)),
            *((bm, 64, 4, 2, "registers", 0) for bm in (8, 16)),
        ):
            yield Sm80GemvConfig(bm, bn, 1, wk, unroll, ring, persistent=True, kept_k=kept_k)  # type: ignore[arg-type]

    def neighbours(self, problem: Problem, config: Sm80GemvConfig) -> Sequence[Iterable[Sm80GemvConfig]]:
        return [_one_knob_away(config)]

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[Sm80GemvConfig]:
        """Return the kernels of least sufficient ``bm``, without and (sm_90) with PDL; empty if M is above 16."""
        if problem.m > MAX_GEMV_ROWS:
            return ()
        room = [c for c in self.pool() if 0 <= c.bm - problem.m < 8]
        return [replace(c, pdl=pdl) for c in room for pdl in (False, True)[: 2 if gpu.arch >= 90 else 1]]

    def proof_shapes(self, problem: Problem, config: Sm80GemvConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
        """Return (M, N, K), whole and ragged, with M up to ``bm``; walking CTAs add shapes of several tiles each."""
        bm, bn, bk = config.bm, config.bn, config.bk
        return [
            *((bm, 2 * bn, 4 * bk * config.wk * config.split_k), (bm - 1, bn + 8, 3 * bk + 8)),
            *((3, 2 * bn - 8, 4096 + 8), (bm // 2 + 1, 19 * bn + 8, bk * config.wk * config.unroll + 24)),
            *((bm, 256, 256), (1, 333, 2 * bk)),
            *_walks(problem, config, gpu),
        ]

    def registers(self, problem: Problem, config: Sm80GemvConfig, shape: Geometry) -> int:
        ring = 4 * gemv_loads_per_step(problem, config)[0] * config.unroll if config.ring == "registers" else 0
        return shape.accumulators + _MODEL_REGISTERS + ring

    def cost_columns(self, problem: Problem, config: Sm80GemvConfig, shape: Geometry) -> dict[str, Any]:
        found = {"stages": config.unroll, "wn": config.wn, "wk": config.wk, "vec": config.vec}
        found |= {"ring_shared": config.ring == "shared", "kept": config.kept_k > 0}
        if config.persistent:
            found |= {"occupancy": gemv_blocks_per_sm(problem, config), "persistent": 1}
        return found

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        ctas = np.ceil(p["n"] / c["bn"]) * c["split"]
        slots = resident_ctas(c["cluster"], c["occupancy"], gpu)
        full = ctas_on_busiest_sm(x, c, ctas, c["occupancy"], gpu)
        active = np.minimum(ctas, slots)
        latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])

        weights = ELEMENT_BYTES * c["bn"] * p["k"] / c["split"]
        exact = np.maximum(ctas / slots, 1.0)
        # Once per tile: the warps of a CTA share them through L1.
        tokens = ELEMENT_BYTES * p["m"] * p["k"] / c["split"] / np.where(c["kept"] > 0, exact, 1.0)
        in_flight = ELEMENT_BYTES * c["bn"] * c["bk"] * c["wk"] * c["stages"]
        in_flight = in_flight * np.where((c["ring_shared"] > 0) | (c["kept"] > 0), 1.0, x["duty"])
        in_flight = np.where(c["persistent"] > 0, in_flight, np.minimum(in_flight, weights))
        one_round = smooth_max(
            weights / in_flight * latency,
            full * (weights + tokens) / x["ingest"],
            active * (weights + tokens) / x["l2"],
        )
        rounds = exact + x["quantum"] * (np.ceil(exact) - exact)

        once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
        # A steady stream takes nearly the time of the slower of two stages.
        stream = above_floor(rounds * one_round, once / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
        exchange = 2 * ELEMENT_BYTES * c["bm"] * c["bn"] * (c["wk"] - 1) / x["exchange"]
        total = launch_us(x, c) + latency + stream + x["epilogue"] + exchange + split_us(x, c)
        return above_floor(total, p["floor"])


def gemv_step(layout: Layout) -> int:
    """Return the depth of K that a warp processes per step: 64 for layout ``TN``, else 32."""
    return 64 if layout == "TN" else 32


def gemv_loads_per_step(problem: Problem, c: Sm80GemvConfig) -> tuple[int, int]:
    """Return the 16-byte loads per thread and step: (of weights, of tokens). ``bm=8, bn=16`` and TN give (4, 2)."""
    step = gemv_step(problem.layout)
    return c.bn // c.wn * step // 256, c.bm // 8 * (step // 32)


def gemv_held_registers(problem: Problem, c: Sm80GemvConfig) -> int:
    """Return the registers of operands and fp32 sums per thread: 84 for ``Sm80GemvConfig(8, 16)`` and TN."""
    weights, tokens = gemv_loads_per_step(problem, c)
    in_registers = c.ring == "registers"
    held = 4 * weights * (c.unroll if in_registers else 1)
    ahead = 2 if in_registers and c.unroll % 2 == 0 and not c.kept_k else 1
    return held + 4 * tokens * ahead + c.bn // c.wn // 16 * c.bm // 2


def gemv_blocks_per_sm(problem: Problem, c: Sm80GemvConfig) -> int:
    """Return the walking CTAs that share an SM of sm_90, 1 or more: 2 for ``Sm80GemvConfig(8, 16)`` and TN."""
    threads = 32 * c.wn * c.wk
    registers = ceil_div(gemv_held_registers(problem, c) + GEMV_WALK_REGISTERS[problem.layout], 8) * 8
    by_memory = SM_SMEM // (gemv_walk_smem(problem, c) + CTA_SMEM)
    return max(1, min(SM_REGISTERS // (threads * registers), SM_THREADS // threads, by_memory))


def gemv_ring_bytes(problem: Problem, c: Sm80GemvConfig) -> int:
    """Return the bytes of the ring in shared memory, per CTA, without kept tokens; 0 for a ring in registers."""
    weights, tokens = gemv_loads_per_step(problem, c)
    loads = weights + (0 if c.kept_k else tokens)
    return c.unroll * loads * 32 * c.wn * c.wk * 16 if c.ring == "shared" else 0


def gemv_kept_steps(problem: Problem, c: Sm80GemvConfig) -> int:
    """Return the steps of each warp in ``kept_k``, rounded up to a multiple of ``unroll``; 0 for ``kept_k=0``."""
    return c.unroll * ceil_div(c.kept_k, gemv_step(problem.layout) * c.wk * c.unroll)


def gemv_walk_smem(problem: Problem, c: Sm80GemvConfig) -> int:
    """Return a walking CTA's bytes of ring, kept tokens and exchange buffers: 7168 for ``Sm80GemvConfig(8, 16)``."""
    kept = gemv_kept_steps(problem, c) * gemv_loads_per_step(problem, c)[1] * 32 * c.wn * c.wk * 16
    return gemv_ring_bytes(problem, c) + kept + 2 * c.wn * (c.bn // c.wn // 16) * (c.bm // 8) * 512 * (c.wk - 1)


def _walks(problem: Problem, c: Sm80GemvConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
    """Return proof shapes for walking CTAs: each gets several tiles, and not all get the same number.

    The last tile is always ragged. The first shape has slightly more K than one round of the ring. The second has one
    tile more than CTAs, and too little K for all warps. Kept tokens add shapes with K just below kept_k.
    """
    if not c.persistent:
        return []
    ctas, round_k = gpu.sms * gemv_blocks_per_sm(problem, c), c.bk * c.wk * c.unroll
    found = [(c.bm, c.bn * (2 * ctas + 5) + 8, round_k + 24), (c.bm - 1, c.bn * (ctas + 1) - 8, c.bk + 8)]
    if c.kept_k:
        found += [(c.bm, c.bn * (ctas + ctas // 3) + 8, c.kept_k - 8), (3, c.bn * (2 * ctas + 1) + 8, 2 * round_k - 8)]
    return found


def _one_knob_away(c: Sm80GemvConfig) -> Iterator[Sm80GemvConfig]:
    """Yield configs that differ in one knob or one idea; some may be illegal."""
    yield replace(c, l2="plain" if c.l2 == "stream_b" else "stream_b")
    if c.warm_k:
        yield replace(c, warm_k=0)
    if c.persistent:
        yield replace(c, persistent=False, kept_k=0)
    for kept_k in (0, *KEPT_K_CHOICES):
        yield replace(c, persistent=True, kept_k=kept_k, split_k=1)
    for unroll in (c.unroll + 1, c.unroll - 1):
        yield replace(c, unroll=unroll)
    yield replace(c, ring="registers" if c.ring == "shared" else "shared")
    yield replace(c, split_k=2 * c.split_k)
    yield replace(c, split_k=c.split_k // 2)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, wk=c.wk // 2)


FAMILY = Sm80GemvMma()
