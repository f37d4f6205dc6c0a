"""The kernel families: the one place that names them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outblas.kernels.families.family import Family

#: One line a family: the module beside this one that has it as ``FAMILY``. Encodings of configs keep this order.
_NAMES = (
    "sm90_wgmma_gemm",
    "sm80_mma_gemm",
    "sm80_gemv_mma",
    "sm80_direct_gemm",
)
FAMILIES: dict[str, Family[Any]] = {name: import_module(f"{__package__}.{name}").FAMILY for name in _NAMES}
