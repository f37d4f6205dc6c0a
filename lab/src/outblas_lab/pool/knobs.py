"""The knobs of all families, and the values that each may have."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.gpu_records import reference_gpu
from outblas.kernels.catalogue import catalogue
from outblas.kernels.families.registry import FAMILIES, knobs_by_name
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import mma_pool, unaligned_pool


@dataclass(frozen=True)
class KnobChoices:
    """The choices of a knob.

    Attributes:
        name: the knob's name, e.g. ``bm``.
        values: the values that may be chosen, e.g. ``(64, 128)``.
        families: names of the families that have the knob.
    """

    name: str
    values: tuple[Any, ...]
    families: tuple[str, ...]


@functools.cache
def all_knobs() -> tuple[KnobChoices, ...]:
    """Return the knobs with every value in the pools, the catalogue, the special candidates and later searches.

    The values are the same on every GPU. Every call returns the same object.
    """
    more: dict[str, tuple[int, ...]] = {}
    for family in FAMILIES.values():
        for name, values in family.more_values.items():
            more[name] = tuple(dict.fromkeys((*more.get(name, ()), *values)))
    return knobs_of((*_reference_kernels(), *mma_pool(), *unaligned_pool()), more)


def _reference_kernels() -> tuple[KernelConfig, ...]:
    gpu = reference_gpu()
    few = (each for family in FAMILIES.values() for each in family.special_kernel_kinds())
    return (*catalogue("pool"), *catalogue(gpu.name), *(c for p, c in few if why_illegal(p, c, gpu) is None))


def knobs_of(
    configs: Sequence[KernelConfig], more: Mapping[str, Sequence[int]] | None = None
) -> tuple[KnobChoices, ...]:
    """Return the knobs of all families, with the values that occur in some configs.

    Switches and words always have all their values. Numbers are sorted. A number that occurs neither in ``configs`` nor
    in ``more`` has the values ``(0,)``.

    Args:
        more: knob -> further values of a number; None: none. Names of unknown knobs are ignored.
    """
    knobs = []
    for name, schema in knobs_by_name().items():
        numbers = {getattr(c, name) for c in configs if c.family in schema} | set((more or {}).get(name, ()))
        # Switches and words have all values; a number without any value gets 0.
        listed = dict.fromkeys(value for knob in schema.values() for value in knob.all_values)
        values = (*listed, *sorted(numbers - set(listed))) or (0,)
        knobs.append(KnobChoices(name, values, tuple(schema)))
    return tuple(knobs)
