"""Configs as points of a Kernel Tuner search space: one tunable parameter per knob, the kernel family first.

Kernel Tuner (https://github.com/KernelTuner/kernel_tuner) wants one value of every parameter at every point, so a knob
that a family lacks has the value :data:`ABSENT` there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.errors import ConfigError, UsageError
from outblas.core.install_hint import needed
from outblas.kernels.config_text import template_from_json
from outblas.kernels.families.registry import knobs_by_name

#: Value of a knob that a family does not have.
ABSENT = "none"
#: Every parameter: the family, and each knob of any family once, in order of declaration.
PARAMETERS = ("family", *knobs_by_name())

Value = str | int | bool
#: One value per parameter, in the order of the parameters.
Point = tuple[Value, ...]


def point(config: KernelConfig, parameters: Sequence[str] = PARAMETERS) -> Point:
    """Return a config's values of the parameters, in their order, as a tuple.

    A knob that its family lacks, or an unknown name, has the value ``"none"`` (:data:`ABSENT`).

    Args:
        parameters: names; default: ``family`` and every knob of any family.
    """
    values = _values(config)
    return tuple([values.get(name, ABSENT) for name in parameters])


@functools.lru_cache(maxsize=1 << 14)
def _values(config: KernelConfig) -> Mapping[str, Value]:
    """Return parameter -> value of a config's family and its own knobs; a search asks for them at every step."""
    return {"family": config.family, **config.knobs()}


def config_at(values: Mapping[str, Any]) -> KernelConfig:
    """Return the config with these values, the inverse of :func:`point`.

    Args:
        values: parameter -> value, ``family`` included; a knob with value ``"none"`` (:data:`ABSENT`) is ignored.

    Raises:
        ConfigError: an unknown parameter or family, a missing knob, or a value that a knob cannot have.
    """
    unknown = sorted(set(values) - set(PARAMETERS))
    if unknown:
        expected, do = f"any of {', '.join(PARAMETERS)}", "pass a Kernel Tuner file of OutBLAS kernels"
        raise ConfigError(f"unknown parameters {unknown}", expected, do)
    return template_from_json({name: value for name, value in values.items() if value != ABSENT})


def tunable(configs: Sequence[KernelConfig], parameters: Sequence[str] = PARAMETERS) -> dict[str, list[Value]]:
    """Return parameter -> the values that it has among the configs: ``"none"`` first, then in ascending order, each
    once.

    Kernel Tuner calls neighbours in these lists adjacent.

    Args:
        parameters: names; default: ``family`` and every knob of any family.

    Raises:
        UsageError: there are no configs.
    """
    if not configs:
        raise UsageError("the search space has no configs", "at least one config", "pass the candidates of a problem")
    columns = zip(*(point(config, parameters) for config in configs), strict=True)
    return {name: sorted(dict.fromkeys(column), key=_order) for name, column in zip(parameters, columns, strict=True)}


def varying(configs: Sequence[KernelConfig]) -> tuple[str, ...]:
    """Return the names of the parameters that have more than one value among the configs, in the order of
    ``PARAMETERS``.

    A knob that only some of the families have varies, too. One config gives ``()``.

    Raises:
        UsageError: there are no configs.
    """
    return tuple(name for name, values in tunable(configs).items() if len(values) > 1)


def restriction(configs: Sequence[KernelConfig]) -> Any:
    """Return a restriction for ``kernel_tuner.tune_kernel`` and ``tune_cache`` that allows the points of these configs
    alone.

    It is asked while a point is put together value by value, and refuses what leads to none of them. Without it Kernel
    Tuner goes through the product of all values of all knobs, some 10^11 points.

    Raises:
        ToolchainMissing: Kernel Tuner is not installed.
    """
    need_kernel_tuner()
    from constraint import FunctionConstraint, Unassigned

    points = [point(config) for config in configs]

    def leads_on(*values: Any) -> bool:
        chosen = [(i, value) for i, value in enumerate(values) if value is not Unassigned]
        return any(all(one[i] == value for i, value in chosen) for one in points)

    return FunctionConstraint(leads_on, assigned=False)


def need_kernel_tuner() -> None:
    """Check that Kernel Tuner can be imported; return None.

    Raises:
        ToolchainMissing: it cannot.
    """
    needed("kernel_tuner", "Kernel Tuner, package kernel_tuner 1.5 or later", "kernel-tuner")


def _order(value: Value) -> tuple[bool, str, int]:
    if isinstance(value, str):
        return (value != ABSENT, value, 0)
    return (True, "", value)
