"""KernelConfig: names and JSON parse back to the same config; damaged ones are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name, config_to_json, knob_schema
from outblas.core.errors import ConfigError
from outblas.kernels.config_text import config_from_json, config_from_name
from outblas.kernels.families.registry import FAMILIES
from support.helpers import ROOT

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

VALUES = {"int": st.integers(-(10**17), 10**17), "bool": st.booleans()}


@st.composite
def configs(draw: Any) -> KernelConfig:
    cls = draw(st.sampled_from([family.config for family in FAMILIES.values()]))
    values = {k.name: draw(st.sampled_from(k.words) if k.words else VALUES[k.kind]) for k in knob_schema(cls)}
    return cls(**values)  # type: ignore[no-any-return]


@given(configs())
def test_name_and_json_lead_back_to_the_same_config(config: KernelConfig) -> None:
    assert config_from_name(config_name(config)) == config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@given(configs(), configs())
def test_names_differ_exactly_where_configs_do(one: KernelConfig, other: KernelConfig) -> None:
    assert (config_name(one) == config_name(other)) == (one == other)


@pytest.mark.parametrize("config", [family.config(16, 16) for family in FAMILIES.values() if family.has_even])
def test_even_is_named_where_it_is_set(config: KernelConfig) -> None:
    even = replace(config, pdl=True, even=True)
    plain = replace(even, even=False)
    assert config_name(even) == config_name(plain) + ",even=true" and "even" not in config_name(plain)
    assert config_from_name(config_name(even)) == even != plain
    assert config_to_json(even) == {**config_to_json(plain), "even": True}
    with pytest.raises(ConfigError, match="even"):
        without = next(family.config(64, 64) for family in FAMILIES.values() if not family.has_even)
        config_from_json({**config_to_json(without), "even": True})


@given(configs())
def test_a_name_has_every_knob_and_is_one_word(config: KernelConfig) -> None:
    name = config_name(config)
    assert not any(c.isspace() for c in name)
    later = getattr(config, "later_knobs", ())
    for f in fields(config):
        written = f.name not in later or getattr(config, f.name) != f.default
        assert (f"{f.name}=" in name) == written == (f.name in config_to_json(config))
    assert name.startswith(config.family + ":")


def test_every_family_is_registered_under_its_own_name() -> None:
    folder = ROOT / "src" / "outblas" / "kernels" / "families"
    assert {path.stem for path in folder.rglob("*.py") if "\nFAMILY = " in path.read_text("utf-8")} == set(FAMILIES)
    assert all(family.config.family == name for name, family in FAMILIES.items())


@pytest.mark.parametrize("cls", [family.config for family in FAMILIES.values()])
def test_a_missing_an_unknown_and_a_mistyped_knob_are_refused(cls: type[KernelConfig]) -> None:
    good = config_to_json(cls(bm=64, bn=64))
    for f in fields(cls):
        if f.name in getattr(cls, "later_knobs", ()):
            assert config_from_json(good) == config_from_json({**good, f.name: f.default})
            continue
        with pytest.raises(ConfigError, match=f.name):
            config_from_json({k: v for k, v in good.items() if k != f.name})
        with pytest.raises(ConfigError, match=f.name):
            config_from_json({**good, f.name: 1.5})
    with pytest.raises(ConfigError, match="turbo"):
        config_from_json({**good, "turbo": 1})
    with pytest.raises(ConfigError, match="bm"):
        config_from_json({**good, "bm": True})  # a bool is no extent


@pytest.mark.parametrize("family", [None, "", "sm70_wmma_gemm", 7])
def test_an_unknown_family_is_refused(family: Any) -> None:
    with pytest.raises(ConfigError, match="family"):
        config_from_json({"family": family, "bm": 64})


@given(configs(), st.data())
def test_a_truncated_name_is_refused(config: KernelConfig, data: Any) -> None:
    later = {f.name: f.default for f in fields(config) if f.name in getattr(config, "later_knobs", ())}
    name = config_name(replace(config, **later))  # without those it is whole, by design
    last = name.rindex(",")
    cut = data.draw(st.integers(0, last))
    with pytest.raises(ConfigError):
        config_from_name(name[:cut])


@pytest.mark.parametrize("change", [",bm=64", ",", ";rm", " ", ",=1", "\n"])
def test_a_name_with_more_in_it_is_refused(change: str) -> None:
    with pytest.raises(ConfigError):
        config_from_name(config_name(next(iter(FAMILIES.values())).config(64, 64)) + change)
