"""The kernel family ``sm80_gemv_mma``: at most 16 rows of A, bound by the reading of B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outblas.config import KernelConfig
from outblas.kernels.families.family import Cache, Family

Ring = Literal["registers", "shared"]


@dataclass(frozen=True, order=True)
class Sm80GemvConfig(KernelConfig):
    """Knobs of ``sm80_gemv_mma``: at most 16 rows of A (tokens), bound by the reading of B (weights).

    Attributes:
        bm: tokens that the kernel has room for, 8 or 16.
        bn: weight rows (columns of C) of a CTA.
        wn, wk: warps side by side, and warps that share the K of the same rows.
        unroll: steps in flight per warp; a step is 64 of K for TN, 32 for NN.
        ring: where they wait: in ``registers``, or ``shared``: in shared memory (cp.async).
        split_k: CTAs of a cluster that share K (sm_90 only), summed through distributed shared memory.
        prefetch: bytes that a miss brings into L2, 128 or 256.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        persistent: as many CTAs as are resident walk over the tiles, loads of the next one in flight while one is
            added up and stored; else one CTA per tile.
        l2: what L2 is told: nothing, or (``stream_b``) that B is read once.
        kept_k: with persistent: K up to which a CTA keeps its tokens in shared memory, read once for all tiles; 0: they
            are read through L1 for every tile.
        warm_k: with early: so much of K behind the ring is on its way into L2 while a CTA waits for its predecessor.
    """

    family: ClassVar[str] = "sm80_gemv_mma"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "persistent", "l2", "kept_k", "warm_k")
    launch_knobs: ClassVar[tuple[str, ...]] = (*KernelConfig.launch_knobs, "warm_k")
    #: Elements per global load: always 16 bytes.
    vec: ClassVar[int] = 8
    #: Depth of K that every layout takes in whole steps.
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
    l2: Cache = "plain"
    kept_k: int = 0
    warm_k: int = 0


class Sm80GemvMma(Family[Sm80GemvConfig]):
    """What is known of ``sm80_gemv_mma``."""

    config = Sm80GemvConfig


FAMILY = Sm80GemvMma()
