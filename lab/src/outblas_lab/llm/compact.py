"""The compact language: a kernel of the template families as a JSON object of its knobs. Absent knobs keep defaults."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

from outblas.core.config import KernelConfig, knob_schema, value_text
from outblas.core.errors import ConfigError
from outblas.core.gpu_records import reference_gpu
from outblas.kernels.config_text import template_from_json
from outblas.kernels.families.registry import FAMILIES

#: Values of a knob that a prompt lists, at most.
_LISTED = 40


def read_config(data: Any) -> KernelConfig:
    """Return the config of an object ``{"family": ..., knob: value, ...}``; knobs with a default may be missing.

    Example: ``{"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}`` suffices. The config need not be legal for any
    problem.

    Raises:
        ConfigError: ``data`` is no dictionary, has an unknown family or knob, or a value that a knob cannot have. Or a
            knob without a default (``bm``, ``bn``) is missing.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"a config has type {type(data).__name__}", "an object of knobs", 'pass e.g. {"family": ...}')
    family = FAMILIES.get(str(data.get("family")))
    return template_from_json({**({} if family is None else family.config.defaults()), **data})


def write_config(config: KernelConfig) -> dict[str, Any]:
    """Return the shortest dictionary from which :func:`read_config` makes the config.

    It has ``family`` first, then the knobs without a default and those whose value is not the default. Example:
    ``{"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}``.
    """
    defaults = config.defaults()
    return {
        "family": config.family,
        **{k: v for k, v in config.knobs().items() if k not in defaults or defaults[k] != v},
    }


def describe(families: Collection[str] = tuple(FAMILIES), meanings: bool = True) -> str:
    """Return text on kernel families for a prompt: the knobs with their meaning, usual values and defaults, one a line.

    A family begins with a line such as ``family sm90_wgmma_gemm. Knobs of ...``. A knob has at most 40 values, evenly
    spaced. Knobs of the launch alone (such as ``pdl``) have no line of values.

    Args:
        families: names of the families; by default all. Unknown names are ignored.
        meanings: False leaves the meanings of the knobs out.
    """
    return "\n".join(line for family in FAMILIES if family in families for line in _family(family, None, meanings))


def describe_offered(offered: Sequence[KernelConfig]) -> str:
    """Return text as :func:`describe` does, for the families of some configs, with the values that occur among them.

    Args:
        offered: the configs; if empty, the result is "". Every knob has its line of values here.
    """
    by_family = {family: [c for c in offered if c.family == family] for family in FAMILIES}
    return "\n".join(line for family, mine in by_family.items() if mine for line in _family(family, mine))


def _family(family: str, offered: Sequence[KernelConfig] | None, meanings: bool = True) -> Iterator[str]:
    cls = FAMILIES[family].config
    about, _, knobs = (inspect.getdoc(cls) or "").partition("\n\nAttributes:\n")
    yield f"family {family}. {about}\n{knobs.rstrip() if meanings else ''}\n  Values:"
    for knob in knob_schema(cls):
        if offered is None and knob.launch_option:
            continue
        if offered is not None:
            values: Sequence[Any] = sorted({getattr(c, knob.name) for c in offered})
        else:
            values = knob.all_values or _usual()[family, knob.name]
        shown = [value_text(v) for v in _thinned(values)]
        default = "" if knob.default is None else f", default {value_text(knob.default)}"
        yield f"    {knob.name}: {', '.join(shown)}{default}"


def _thinned(values: Sequence[Any]) -> list[Any]:
    """Return at most 40 of the values, evenly spaced, with the first and the last."""
    if len(values) <= _LISTED:
        return list(values)
    return [values[round(i * (len(values) - 1) / (_LISTED - 1))] for i in range(_LISTED)]


@cache
def _usual() -> dict[tuple[str, str], tuple[Any, ...]]:
    """(family, knob) -> its values in the pools, in the catalogue and beside it."""
    from outblas.kernels.catalogue import catalogue
    from outblas_lab.pool.knobs import all_knobs

    configs = (*catalogue("pool"), *catalogue("mma-pool"), *catalogue(reference_gpu().name))
    found = {}
    for knob in all_knobs():
        for family in knob.families:
            values = {getattr(c, knob.name) for c in configs if c.family == family}
            found[family, knob.name] = tuple(sorted(values)) or knob.values
    return found
