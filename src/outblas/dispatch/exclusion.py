"""``OUTBLAS_EXCLUDE``: products that torch computes and kernels that do not run, e.g. since a result looked wrong.

Decisions ask it once, when a product is decided. Repeated calls repeat the decision, so the list costs them nothing.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import ConfigError
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.registry import FAMILIES

EXCLUDE_VARIABLE = "OUTBLAS_EXCLUDE"
#: A comma between two items. Within a kernel's name a comma precedes a knob.
_BETWEEN_ITEMS = re.compile(r",(?!\s*\w+=)")
_SHAPE = re.compile(r"([1-9]\d*|\*)_([1-9]\d*|\*)_([1-9]\d*|\*)")


@dataclass(frozen=True)
class Exclusions:
    """Products and kernels that are excluded.

    Attributes:
        shapes: ``M_N_K``, each part a number or ``*``.
        kernels: names of kernel families, and of single kernels as :func:`outblas.core.config.config_name` spells them.
    """

    shapes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    def why_not(self, problem: Problem, config: KernelConfig | None = None) -> str:
        """Return in one line why torch must compute a product, or why a kernel must not; empty if it may."""
        extents = (str(problem.m), str(problem.n), str(problem.k))
        for shape in self.shapes:
            if all(part in ("*", extent) for part, extent in zip(shape.split("_"), extents, strict=True)):
                return f"excluded by {EXCLUDE_VARIABLE} ({shape})"
        if config is None or not self.kernels:  # a ranking asks of hundreds of kernels, whose names take time to spell
            return ""
        found = next((name for name in (config.family, config_name(config)) if name in self.kernels), "")
        return f"its kernel is excluded by {EXCLUDE_VARIABLE} ({found})" if found else ""


def exclusions_of_environment() -> Exclusions:
    """Return what ``OUTBLAS_EXCLUDE`` lists now. Malformed items exclude nothing; one RuntimeWarning names them all."""
    return _parsed(os.environ.get(EXCLUDE_VARIABLE, ""))


@functools.cache
def _parsed(text: str) -> Exclusions:
    items = dict.fromkeys(item.strip() for item in _BETWEEN_ITEMS.split(text) if item.strip())
    shapes = tuple(item for item in items if _SHAPE.fullmatch(item))
    kernels = tuple(item for item in items if _names_kernels(item))
    if wrong := [item for item in items if item not in (*shapes, *kernels)]:
        warnings.warn(
            f"{EXCLUDE_VARIABLE} has no effect for {', '.join(map(repr, wrong))}: expected M_N_K with numbers or *, "
            f"a kernel name from outblas.explain, or a family ({', '.join(FAMILIES)}), separated by commas",
            RuntimeWarning,
            stacklevel=4,
        )
    return Exclusions(shapes, kernels)


def _names_kernels(item: str) -> bool:
    """Return True for the name of a kernel family, or of a kernel of this version."""
    with suppress(ConfigError):
        return item in FAMILIES or bool(config_from_name(item))
    return False
