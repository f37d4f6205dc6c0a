"""The registry of kernel families: every module in this folder that is named as a family is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, Knob, knob_schema
from outblas.kernels.families.family import Family

#: Modules in this folder, as far as encodings of configs depend on the order of their families. Others follow by name.
_FIRST = (
    "sm90_wgmma.sm90_wgmma_gemm",
    "sm80_mma_gemm",
    "sm80_gemv_mma",
    "sm80_direct_gemm",
    "sm80_pipelined_gemm",
    "sm90_oddrows_gemm",
)
#: Families with an input column in packaged policies and models, in order. A name stays even if its family is removed.
#: A name is added only when all policies and models are trained again. Kernels of other families have 0 in each of
#: these columns, unless LEARNED_AS names one.
LEARNED_FAMILIES = ("sm90_wgmma_gemm", "sm80_mma_gemm", "sm80_gemv_mma", "sm80_direct_gemm")
#: Family that was not learned -> the learned family that it resembles, whose column its kernels have.
LEARNED_AS = {"sm80_pipelined_gemm": "sm80_mma_gemm", "sm90_oddrows_gemm": "sm90_wgmma_gemm"}


def family_modules(folder: Path, first: Sequence[str] = ()) -> list[str]:
    """Return the modules in a folder and its packages that are named as a family is, ``<arch>_<instruction>_<op>``.

    Args:
        first: modules that come first, in this order. The others follow by name.
    """
    paths = sorted(folder.rglob("sm[0-9]*_*_*.py"), key=lambda path: path.name)
    found = (".".join(path.relative_to(folder).with_suffix("").parts) for path in paths)
    return list(dict.fromkeys((*first, *found)))


FAMILIES: dict[str, Family[Any]] = {
    family.name: family
    for family in (
        import_module(f"{__package__}.{module}").FAMILY for module in family_modules(Path(__file__).parent, _FIRST)
    )
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
