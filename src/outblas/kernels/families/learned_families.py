"""The families that packaged policies and models were trained with."""

from __future__ import annotations

#: Families that have a column among the inputs of packaged policies and models, in order. A name stays when its family
#: goes. One is added only when all of them are trained anew. Kernels of another family have 0 in every such column.
LEARNED_FAMILIES = ("sm90_wgmma_gemm", "sm80_mma_gemm", "sm80_gemv_mma", "sm80_direct_gemm")
