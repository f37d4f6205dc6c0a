"""The kernel family ``sm80_direct_gemm``: tiny products, operands from global memory straight to registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outblas.config import KernelConfig
from outblas.kernels.families.family import Family


@dataclass(frozen=True, order=True)
class Sm80DirectConfig(KernelConfig):
    """Knobs of ``sm80_direct_gemm``: tiny products, operands from global memory straight to registers.

    Attributes:
        bm, bn: tile of C in elements.
        wm, wn, wk: warps along M, N and K; wk > 1 splits K inside the CTA.
        unroll: chunks of 32 of K that a warp loads before it multiplies.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        even: launch option on top of pdl: no SM is given more CTAs than an even distribution gives it.
    """

    family: ClassVar[str] = "sm80_direct_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "even")
    #: Elements per global load: always 16 bytes.
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
    """What is known of ``sm80_direct_gemm``."""

    config = Sm80DirectConfig


FAMILY = Sm80DirectGemm()
