"""The families with which the packaged policies and models were trained."""

from __future__ import annotations

#: Families with an input column in packaged policies and models, in order. A name stays even if its family is removed.
#: A name is added only when all policies and models are trained again. Kernels of other families have 0 in each of
#: these columns, unless LEARNED_AS names one.
LEARNED_FAMILIES = ("sm90_wgmma_gemm", "sm80_mma_gemm", "sm80_gemv_mma", "sm80_direct_gemm")
#: Family that was not learned -> the learned family that it resembles, whose column its kernels have.
LEARNED_AS = {"sm80_pipelined_gemm": "sm80_mma_gemm", "sm90_oddrows_gemm": "sm90_wgmma_gemm"}
