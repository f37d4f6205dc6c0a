"""Every knob of every kernel family as one vector of choices, there and back, and which choices are still worth making.

A vector has the family first and then the knobs of all families by name, each as the place of its value in the knob's
list. A knob that a family lacks is ignored for it, and is at its first value where a config is written as a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, config_name, knob_schema
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import candidates, catalogue
from outblas.kernels.families.registry import FAMILIES, knobs_by_name
from outblas.kernels.legality import why_illegal

#: The knob that the others depend on.
FAMILY = "family"


@dataclass(frozen=True)
class KnobChoices:
    """The choices of one knob.

    Attributes:
        name: The knob's name.
        values: The values that may be chosen, in order.
        families: The families that have the knob.
    """

    name: str
    values: tuple[Any, ...]
    families: tuple[str, ...]


class Knobs:
    """The knobs, and configs as vectors of choices.

    Attributes:
        knobs: the family, then every knob in the order of the config records. nvec: int64[knobs], choices of each.
    """

    def __init__(self, knobs: Sequence[KnobChoices]) -> None:
        self.knobs = tuple(knobs)
        self.nvec: NDArray[np.int64] = np.array([len(knob.values) for knob in knobs], np.int64)
        self._place = [{value: i for i, value in enumerate(knob.values)} for knob in knobs]
        self._has = np.array([[family in knob.families for knob in knobs] for family in knobs[0].values])

    def encode(self, config: KernelConfig) -> NDArray[np.int64]:
        """int64[knobs]: the vector that :meth:`decode` makes this config of.

        Raises:
            UsageError: a knob has a value that is not in its list.
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
        """The config of a vector of choices; it need not be legal for any problem.

        Raises:
            UsageError: not as many choices as there are knobs, or one that its knob does not have.
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
        """bool[knobs]: which of them the config's family has."""
        row: NDArray[np.bool_] = self._has[self._place[0][config.family]]
        return row

    def mask(self, vectors: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[sum of nvec]: the choices that any of the vectors, int64[n, knobs], makes; knob after knob."""
        found = np.zeros(int(self.nvec.sum()), np.bool_)
        starts = np.concatenate(([0], np.cumsum(self.nvec)[:-1]))
        found[(vectors + starts).ravel()] = True
        return found


@functools.cache
def all_knobs() -> Knobs:
    """The knobs with every value that the pool, the catalogue, what is offered beside it and later searches have."""
    few = (each for family in FAMILIES.values() for each in family.special_kernel_kinds())
    return knobs_of(
        (*catalogue("pool"), *catalogue(), *(c for p, c in few if why_illegal(p, c) is None)), _more_values()
    )


def _more_values() -> Mapping[str, tuple[int, ...]]:
    """Knob -> values beside those that catalogue and pool have: what families add for searches and odd rows."""
    found: dict[str, tuple[int, ...]] = {}
    for family in FAMILIES.values():
        for name, values in family.more_values.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
    return found


def knobs_of(configs: Sequence[KernelConfig], more: Mapping[str, Sequence[int]] | None = None) -> Knobs:
    """The knobs of the config records, with the values that any of ``configs`` has (``more``: and these, by name)."""
    knobs = [KnobChoices(FAMILY, tuple(FAMILIES), tuple(FAMILIES))]
    for name, schema in knobs_by_name().items():
        numbers = {getattr(c, name) for c in configs if c.family in schema} | set((more or {}).get(name, ()))
        # A switch and a word have all their values; a number that nobody names has its least.
        listed = dict.fromkeys(value for knob in schema.values() for value in knob.all_values)
        values = (*listed, *sorted(numbers - set(listed))) or (0,)
        knobs.append(KnobChoices(name, values, tuple(schema)))
    return Knobs(knobs)


def all_legal_configs(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Every legal config of the pool and of what is offered for a problem, with each launch option that it may have."""
    kernels = dict.fromkeys((*catalogue("pool"), *candidates(problem, gpu, early=True, even=True)))
    early = (config.with_knobs(early=True) for config in kernels if config.pdl)
    return [c for c in dict.fromkeys((*kernels, *early)) if why_illegal(problem, c, gpu) is None]
