"""The kernel family ``sm90_wgmma_gemm``: TMA loads, an mbarrier pipeline and warp-specialised wgmma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outblas.config import KernelConfig
from outblas.kernels.families.family import Cache, Family

Schedule = Literal["coop", "stagger", "pingpong"]
Store = Literal["tma", "direct"]
Raster = Literal["m", "n"]
SplitKind = Literal["cluster", "workspace"]
#: Those that stream C out, which needs TMA stores.
STREAMING_C = ("stream_c", "stream_bc", "stream_ac")


@dataclass(frozen=True, order=True)
class Sm90WgmmaConfig(KernelConfig):
    """Knobs of ``sm90_wgmma_gemm``: TMA loads, mbarrier pipeline, warp-specialised wgmma.

    Attributes:
        bm, bn, bk: tile of C in elements and depth of one pipeline stage.
        stages: pipeline depth.
        consumers: warpgroups that issue wgmma.
        schedule: ``coop``: consumers share one tile; ``stagger``: the same, one behind the other, so that
            their epilogues do not coincide; ``pingpong``: they alternate tiles.
        cluster_m, cluster_n: CTAs of a cluster along M and N; operand tiles are multicast in it.
        split_k: CTAs that share one tile's K.
        persistent: one CTA per SM walks over tiles; else one CTA per tile.
        raster: extent that consecutive tiles walk along first; group: tiles of the other extent
            walked together (L2 reuse).
        store: ``tma``: stmatrix to shared memory, then TMA; ``direct``: registers to global.
        min_blocks: CTAs per SM that the register allocation must allow.
        pdl: launch option, programmatic dependent launch: the prologue overlaps the predecessor.
        l2: what L2 is told: nothing (``plain``), or what streams through it: C, which is not read again; B or A, which
            is read once while the other is read again and again; or C with one of them.
        split_kind: how the parts of a split K meet. ``cluster``: its CTAs are one cluster and add up through
            distributed shared memory; ``workspace``: they may run anywhere, write their parts to global
            memory, and the last to arrive adds up.
        early: launch option on top of pdl, see :data:`Launch`: the first loads of B do not wait for the predecessor.
        a_rows: rows of A that are loaded and kept in a stage, of the 64 that wgmma multiplies; 0: all. For M of at
            most so much: a load that reaches past M is slow, and narrow stages leave room for more of them.
        shift: tiles that would reach past M or N are moved back inside, and some of C is computed twice; else what lies
            outside is clipped.
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
    l2: Cache = "plain"
    early: bool = False
    a_rows: int = 0
    shift: bool = False

    @property
    def loaded_rows(self) -> int:
        """Rows of A in a stage."""
        return self.a_rows or self.bm

    @property
    def cluster_split(self) -> int:
        """CTAs of a cluster along K."""
        return 1 if self.split_kind == "workspace" else self.split_k


class Sm90WgmmaGemm(Family[Sm90WgmmaConfig]):
    """What is known of ``sm90_wgmma_gemm``."""

    config = Sm90WgmmaConfig


FAMILY = Sm90WgmmaGemm()
