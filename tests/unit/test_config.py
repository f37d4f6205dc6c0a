"""KernelConfig: names and JSON there and back; what is damaged is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from outblas.config import (
    FAMILIES,
    KernelConfig,
    Sm80GemvConfig,
    Sm80MmaConfig,
    Sm90WgmmaConfig,
    config_from_json,
    config_from_name,
    config_name,
    config_to_json,
)
from outblas.errors import ConfigError

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

WORDS = {
    "Schedule": ["coop", "pingpong"],
    "Store": ["tma", "direct"],
    "Raster": ["m", "n"],
    "Ring": ["registers", "shared"],
}
VALUES = {"int": st.integers(-(10**17), 10**17), "bool": st.booleans()} | {
    kind: st.sampled_from(words) for kind, words in WORDS.items()
}


@st.composite
def configs(draw: Any) -> KernelConfig:
    cls = draw(st.sampled_from(list(FAMILIES.values())))
    return cls(**{f.name: draw(VALUES[str(f.type)]) for f in fields(cls)})  # type: ignore[no-any-return]


@given(configs())
def test_name_and_json_lead_back_to_the_same_config(config: KernelConfig) -> None:
    assert config_from_name(config_name(config)) == config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@given(configs(), configs())
def test_names_differ_exactly_where_configs_do(one: KernelConfig, other: KernelConfig) -> None:
    assert (config_name(one) == config_name(other)) == (one == other)


@given(configs())
def test_a_name_has_every_knob_and_is_one_word(config: KernelConfig) -> None:
    name = config_name(config)
    assert not any(c.isspace() for c in name)
    assert all(f"{f.name}=" in name for f in fields(config))
    assert name.startswith(config.family + ":")


def test_every_family_is_registered_under_its_own_name() -> None:
    assert {Sm90WgmmaConfig.family, Sm80MmaConfig.family, Sm80GemvConfig.family} <= set(FAMILIES)
    assert all(cls.family == name for name, cls in FAMILIES.items())


@pytest.mark.parametrize("cls", FAMILIES.values())
def test_a_missing_an_unknown_and_a_mistyped_knob_are_refused(cls: type[KernelConfig]) -> None:
    good = config_to_json(cls(bm=64, bn=64))
    for f in fields(cls):
        with pytest.raises(ConfigError, match=f.name):
            config_from_json({k: v for k, v in good.items() if k != f.name})
        with pytest.raises(ConfigError, match=f.name):
            config_from_json({**good, f.name: 1.5})
    with pytest.raises(ConfigError, match="turbo"):
        config_from_json({**good, "turbo": 1})
    with pytest.raises(ConfigError, match="bm"):
        config_from_json({**good, "bm": True})  # a bool is no extent


def test_a_word_that_a_knob_does_not_have_is_refused() -> None:
    good = config_to_json(Sm90WgmmaConfig(64, 64))
    for knob, word in (("schedule", "stream"), ("store", "cp"), ("raster", "k")):
        with pytest.raises(ConfigError, match=knob):
            config_from_json({**good, knob: word})


@pytest.mark.parametrize("family", [None, "", "sm70_wmma_gemm", 7])
def test_an_unknown_family_is_refused(family: Any) -> None:
    with pytest.raises(ConfigError, match="family"):
        config_from_json({"family": family, "bm": 64})


@given(configs(), st.data())
def test_a_truncated_name_is_refused(config: KernelConfig, data: Any) -> None:
    name = config_name(config)
    last = name.rindex(",")
    cut = data.draw(st.integers(0, last))
    with pytest.raises(ConfigError):
        config_from_name(name[:cut])


@pytest.mark.parametrize("change", [",bm=64", ",", ";rm", " ", ",=1", "\n"])
def test_a_name_with_more_in_it_is_refused(change: str) -> None:
    with pytest.raises(ConfigError):
        config_from_name(config_name(Sm80MmaConfig(64, 64)) + change)
