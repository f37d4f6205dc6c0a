"""The registry of kernel families, the only place that names all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, Knob, knob_schema
from outblas.kernels.families.family import Family

#: One line per family: the module in this folder that defines ``FAMILY``. Encodings of configs depend on this order.
_MODULES = (
    "sm90_wgmma.sm90_wgmma_gemm",
    "sm80_mma_gemm",
    "sm80_gemv_mma",
    "sm80_direct_gemm",
    "sm80_pipelined_gemm",
    "sm90_oddrows_gemm",
)
FAMILIES: dict[str, Family[Any]] = {
    family.name: family for family in (import_module(f"{__package__}.{module}").FAMILY for module in _MODULES)
}


def knobs_by_name() -> dict[str, dict[str, Knob]]:
    """Return knob name -> family name -> the family's knob. Families that lack a knob are left out of its entry.

    All encodings across families take their knobs from here: family after family, each knob at its first occurrence. So
    the first name is ``bm``. Example: two families have the knob ``even``.
    """
    found: dict[str, dict[str, Knob]] = {}
    for name, family in FAMILIES.items():
        for knob in knob_schema(family.config):
            found.setdefault(knob.name, {})[name] = knob
    return found


def by_family(configs: Sequence[KernelConfig]) -> Iterator[tuple[str, NDArray[np.intp], list[KernelConfig]]]:
    """Yield, for each family among the configs: its name, the places of its configs in rising order, these configs.

    Families come in the order of their first config. Without configs, nothing is yielded.
    """
    families = np.array([config.family for config in configs])
    for family in dict.fromkeys(config.family for config in configs):
        places = np.flatnonzero(families == family)
        yield family, places, [configs[int(i)] for i in places]
