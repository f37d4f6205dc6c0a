"""Encode configs of all families as vectors of choices, and decode them; masks of useful choices.

A vector has the family first, then the knobs of all families by name. Each entry is the index of a value in its knob's
list. A knob that the family lacks is ignored in decoding, and is 0 in encoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, config_name, knob_schema
from outblas.core.errors import UsageError
from outblas.core.gpu_records import reference_gpu
from outblas.kernels.catalogue import catalogue
from outblas.kernels.families.family import Family
from outblas.kernels.families.registry import FAMILIES, knobs_by_name
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import mma_pool, pool_families, unaligned_pool

#: Name of the first entry, on which the others depend.
FAMILY = "family"


@dataclass(frozen=True)
class KnobChoices:
    """The choices of a knob.

    Attributes:
        name: the knob's name, e.g. ``bm``; ``family`` for the first entry of a vector.
        values: the values that may be chosen, e.g. ``(64, 128)``. A vector holds an index into them.
        families: names of the families that have the knob.
    """

    name: str
    values: tuple[Any, ...]
    families: tuple[str, ...]


class Knobs:
    """All knobs, with conversion between configs and vectors of choices.

    Args:
        knobs: the knob ``family``, whose values are family names; then every other knob.

    Attributes:
        nvec: int64[knobs], number of choices of each.
    """

    def __init__(self, knobs: Sequence[KnobChoices]) -> None:
        self.knobs = tuple(knobs)
        self.nvec: NDArray[np.int64] = np.array([len(knob.values) for knob in knobs], np.int64)
        self._place = [{value: i for i, value in enumerate(knob.values)} for knob in knobs]
        self._has = np.array([[family in knob.families for knob in knobs] for family in knobs[0].values])

    def encode(self, config: KernelConfig) -> NDArray[np.int64]:
        """Return the vector of a config, int64[knobs]; :meth:`decode` inverts it.

        Entry i is the index of the config's value in ``knobs[i].values``. It is 0 for a knob that the family lacks.
        Entry 0 is the index of the family.

        Raises:
            UsageError: a knob's value is not in its list.
        """
        found = np.zeros(len(self.knobs), np.int64)
        for i, knob in enumerate(self.knobs):
            if config.family in knob.families:
                value = getattr(config, knob.name)
                if value not in self._place[i]:
                    raise UsageError(
                        f"{config_name(config)}: {knob.name}={value!r}",
                        f"one of {', '.join(map(str, knob.values))}",
                        "offer configs of these values only",
                    )
                found[i] = self._place[i][value]
        return found

    def decode(self, action: Sequence[int] | NDArray[Any]) -> KernelConfig:
        """Return the config of a vector. It may be illegal for every problem.

        Entries of knobs that the family lacks are ignored, but they must be in range.

        Args:
            action: integers, one per knob; entry i is in 0..nvec[i] - 1. A list or an array of any integer dtype.

        Raises:
            UsageError: wrong length, values that are not integers, or an entry out of range.
        """
        chosen = np.asarray(action)
        if chosen.shape != self.nvec.shape or not np.issubdtype(chosen.dtype, np.integer):
            raise UsageError(f"an action of {chosen.dtype}{list(chosen.shape)}", f"int64[{len(self.nvec)}]", "see nvec")
        if ((chosen < 0) | (chosen >= self.nvec)).any():
            raise UsageError(f"action {chosen.tolist()}", f"0 or more, below {self.nvec.tolist()}", "see nvec")
        values = {knob.name: knob.values[i] for knob, i in zip(self.knobs, chosen, strict=True)}
        family = values.pop(FAMILY)
        cls = FAMILIES[family].config
        config: KernelConfig = cls(**{knob.name: values[knob.name] for knob in knob_schema(cls)})
        return config

    def applies(self, config: KernelConfig) -> NDArray[np.bool_]:
        """Return bool[knobs]: True for the knobs that the config's family has. Entry 0, the family, is always True."""
        row: NDArray[np.bool_] = self._has[self._place[0][config.family]]
        return row


@functools.cache
def all_knobs() -> Knobs:
    """Return the knobs with every value in the pools, the catalogue, the special candidates and later searches.

    The values are the same on every GPU. Every call returns the same object. The first knob is ``family``.
    """
    return knobs_of((*_reference_kernels(), *mma_pool(), *unaligned_pool()), _more_values(FAMILIES.values()))


@functools.cache
def reference_knobs() -> Knobs:
    """Return the knobs as :func:`all_knobs`, without the values that only families outside of the pool need."""
    return knobs_of(_reference_kernels(), _more_values(pool_families()))


@functools.cache
def _reference_kernels() -> tuple[KernelConfig, ...]:
    """Return the kernels of the pool, and of the reference GPU's catalogue and special problems."""
    gpu = reference_gpu()
    few = (each for family in FAMILIES.values() for each in family.special_kernel_kinds())
    return (*catalogue("pool"), *catalogue(gpu.name), *(c for p, c in few if why_illegal(p, c, gpu) is None))


def _more_values(families: Iterable[Family[Any]]) -> Mapping[str, tuple[int, ...]]:
    """Return knob -> values beyond those of catalogue and pool, which families add for searches and unaligned rows."""
    found: dict[str, tuple[int, ...]] = {}
    for family in families:
        for name, values in family.more_values.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
    return found


def knobs_of(configs: Sequence[KernelConfig], more: Mapping[str, Sequence[int]] | None = None) -> Knobs:
    """Return the knobs of all families, with the values that occur in some configs.

    Switches and words always have all their values. Numbers are sorted. A number that occurs neither in ``configs`` nor
    in ``more`` has the values ``(0,)``. The knob ``family`` comes first and always has all families.

    Args:
        more: knob -> further values of a number; None: none. Names of unknown knobs are ignored.
    """
    knobs = [KnobChoices(FAMILY, tuple(FAMILIES), tuple(FAMILIES))]
    for name, schema in knobs_by_name().items():
        numbers = {getattr(c, name) for c in configs if c.family in schema} | set((more or {}).get(name, ()))
        # Switches and words have all values; a number without any value gets 0.
        listed = dict.fromkeys(value for knob in schema.values() for value in knob.all_values)
        values = (*listed, *sorted(numbers - set(listed))) or (0,)
        knobs.append(KnobChoices(name, values, tuple(schema)))
    return Knobs(knobs)
