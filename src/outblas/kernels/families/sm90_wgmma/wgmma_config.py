"""The knobs of ``sm90_wgmma_gemm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outblas.core.config import KernelConfig
from outblas.kernels.families.family import CacheHint

Schedule = Literal["coop", "stagger", "pingpong"]
Store = Literal["tma", "direct"]
Raster = Literal["m", "n"]
SplitKind = Literal["cluster", "workspace"]
Reducers = Literal["last", "all"]
#: Registers per thread in addition to accumulators (addresses, descriptors, loop state).
NON_ACCUMULATOR_REGISTERS = 40


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
            slow, and smaller stages allow more of them. One less than a multiple of 8: a load has just the M rows.
        shift: tiles that would reach past M or N are moved inside, so some of C is computed twice. False: they are
            clipped.
        swap: compute the transpose of C and store it transposed: bm may be any multiple of 8, and bn is 64, 128, 192 or
            256. For TN.
        ctas: CTAs of a persistent kernel; 0: one per SM.
        reducers: with a workspace: ``last``: the last part to arrive sums. ``all``: every part sums a share of the
            tile, if all parts arrive soon; needs no part to be resident with another.
    """

    family: ClassVar[str] = "sm90_wgmma_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = (
        "split_kind", "l2", "early", "a_rows", "shift", "swap", "ctas", "reducers",
    )  # fmt: skip
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
    swap: bool = False
    ctas: int = 0
    reducers: Reducers = "last"

    @property
    def loaded_rows(self) -> int:
        """Return the rows of A for which a stage has room: whole groups of 8, the height of a swizzle pattern."""
        return -(-self.a_rows // 8) * 8 or self.bm

    @property
    def fits_m(self) -> bool:
        """Return True if a load of A has just the M rows that exist."""
        return self.a_rows % 8 != 0

    @property
    def streams_a(self) -> bool:
        """Return True if A streams through L2."""
        return self.l2 in ("stream_a", "stream_ac")

    @property
    def streams_b(self) -> bool:
        """Return True if B streams through L2."""
        return self.l2 in ("stream_b", "stream_bc")

    @property
    def streams_c(self) -> bool:
        """Return True if C streams out through L2, which needs TMA stores."""
        return self.l2 in ("stream_c", "stream_bc", "stream_ac")

    @property
    def cluster_split(self) -> int:
        """Return the CTAs of a cluster along K; 1 for a workspace."""
        return 1 if self.split_kind == "workspace" else self.split_k
