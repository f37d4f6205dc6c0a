"""The kernel families: the one place that names them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outblas.core.config import Knob, knob_schema
from outblas.kernels.families.family import Family

#: One line a family: the module beside this one that has it as ``FAMILY``. Encodings of configs keep this order.
_NAMES = (
    "sm90_wgmma_gemm",
    "sm80_mma_gemm",
    "sm80_gemv_mma",
    "sm80_direct_gemm",
)
FAMILIES: dict[str, Family[Any]] = {name: import_module(f"{__package__}.{name}").FAMILY for name in _NAMES}


def knobs_by_name() -> dict[str, dict[str, Knob]]:
    """Knob -> family -> the knob as the family has it.

    Every encoding of all families has its knobs from here: family after family, each knob where it is first met.
    """
    found: dict[str, dict[str, Knob]] = {}
    for name, family in FAMILIES.items():
        for knob in knob_schema(family.config):
            found.setdefault(knob.name, {})[name] = knob
    return found
