"""Parse configurations from names and from JSON: the inverse of :mod:`outblas.core.config`."""

from __future__ import annotations

import functools
import re
from typing import Any

from outblas.core.config import Candidate, KernelConfig, config_name, knob_schema
from outblas.core.errors import ConfigError
from outblas.core.lab_parts import part
from outblas.kernels.families.registry import FAMILIES

#: Family of free kernels, which outblas-lab defines.
FREE = "free"


@functools.lru_cache(maxsize=1 << 14)  # files name the same kernels again and again
def config_from_name(name: str) -> KernelConfig:
    """Return the config of a canonical name; the inverse of :func:`outblas.core.config.config_name`.

    Every knob must be there in field order. Only later knobs may be missing, and they must be missing at their default.
    Numbers are not checked: they may be illegal for every problem. Names of free kernels are an unknown family.

    Example: ``"sm80_mma_gemm:bm=64,bn=64,bk=64,stages=3,wm=2,wn=2,wk=1,split_k=1,vec=8,pdl=false"`` gives
    ``Sm80MmaConfig(64, 64)``.

    Raises:
        ConfigError: unknown family, missing or unknown knob, wrong type or word, or a name that is not canonical.
    """
    family, _, rest = name.partition(":")
    pairs = dict(re.findall(r"(\w+)=([^,]*)", rest))
    config = template_from_json({**{k: _value(v) for k, v in pairs.items()}, "family": family})
    if config_name(config) != name:
        raise ConfigError(f"non-canonical config name {name!r}", config_name(config), "use the canonical name")
    return config


def config_from_json(data: dict[str, Any]) -> Candidate:
    """Return the candidate of a JSON object; the inverse of :func:`outblas.core.config.config_to_json`.

    Args:
        data: ``{"family": "free", "text": ...}`` for a free kernel; otherwise as for :func:`template_from_json`.

    Raises:
        ConfigError: as :func:`template_from_json`.
        ContractError: the text of a free kernel breaks the contract or is missing.
        ToolchainMissing: it is a free kernel, and outblas-lab is not installed.
    """
    if data.get("family") != FREE:
        return template_from_json(data)
    found: Candidate = part("free", "a free kernel").parse(data.get("text", ""))
    return found


def template_from_json(data: dict[str, Any]) -> KernelConfig:
    """Return the config of a JSON object of a template family.

    Numbers are not checked: they may be illegal for every problem.

    Args:
        data: ``{"family": ..., knob: value, ...}``; it is not changed. Every knob must be there, even if it has a
            default. Only later knobs may be missing. Later knobs are ``later_knobs`` of the family's record, e.g.
            ``early``.

    Raises:
        ConfigError: missing or unknown family, missing or unknown knob, or a value of the wrong type or word. A float
            or a bool is no int.
    """
    found = FAMILIES.get(str(data.get("family")))
    if found is None:
        raise ConfigError(
            f"unknown kernel family {data.get('family')!r}", " or ".join(FAMILIES), "use a config from this version"
        )
    family, cls = found.name, found.config
    knobs = {k: v for k, v in data.items() if k != "family"}
    known = {knob.name: knob for knob in knob_schema(cls)}
    later = {name for name, knob in known.items() if knob.later}
    odd = sorted((set(knobs) ^ set(known)) - (later - set(knobs)))
    if odd:
        wrong = f"{family}: knobs {odd} are missing or unknown"
        raise ConfigError(wrong, f"exactly {sorted(known)}", "list every knob")
    for key, value in knobs.items():
        knob = known[key]
        want = {"bool": bool, "int": int, "word": str}[knob.kind]
        if type(value) is not want:
            raise ConfigError(f"{family}: {key}={value!r}", f"a value of type {want.__name__}", "correct the knob")
        if knob.words and value not in knob.words:
            raise ConfigError(f"{family}: {key}={value!r}", " or ".join(knob.words), "correct the knob")
    config: KernelConfig = cls(**knobs)
    return config


def _value(text: str) -> Any:
    """Return the text of a knob's value as bool, int, or (if it is neither) str."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
