"""The kernel family ``sm80_mma_gemm``: cp.async in several stages, ldmatrix and mma.sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outblas.config import KernelConfig
from outblas.kernels.families.family import Family


@dataclass(frozen=True, order=True)
class Sm80MmaConfig(KernelConfig):
    """Knobs of ``sm80_mma_gemm``: cp.async multistage, ldmatrix, mma.sync.

    Attributes:
        bm, bn, bk: tile of C and depth of one stage, elements.
        stages: cp.async pipeline depth.
        wm, wn, wk: warps along M, N and K; wk > 1 splits every stage's K inside the CTA.
        split_k: CTAs of a cluster that share one tile's K (sm_90 only), summed through distributed
            shared memory.
        vec: elements per global load (8, 4, 2: cp.async of 16, 8, 4 bytes; 1: predicated scalar
            loads, for rows of any alignment).
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        even: launch option on top of pdl: no SM is given more CTAs than an even distribution gives it, see
            :func:`outblas.geometry.launch_smem`; the machine code is the same.
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


class Sm80MmaGemm(Family[Sm80MmaConfig]):
    """What is known of ``sm80_mma_gemm``."""

    config = Sm80MmaConfig


FAMILY = Sm80MmaGemm()
