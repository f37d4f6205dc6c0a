"""A knob of a family that is only registered is in every encoding of configs, with no other line of code."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest

from outblas.core.config import KernelConfig, config_name, config_to_json, knob_schema
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json, config_from_name
from outblas.kernels.families.registry import FAMILIES, LEARNED_FAMILIES, knobs_by_name
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.predict.features import CANDIDATE_FEATURES
from outblas.tune.agents import transfer
from outblas_lab.agents import evolution, tpe
from outblas_lab.kernel_tuner import knob_space, t4_files
from outblas_lab.llm.compact import describe_offered, read_config, write_config
from outblas_lab.llm.prompt import choice_prompt
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.pool.knobs import knobs_of
from outblas_lab.publish.words import short_config
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)


@dataclass(frozen=True, order=True)
class TrialConfig(KernelConfig):
    """Knobs of ``sm99_trial_gemm``, a family of this test alone.

    Attributes:
        bm: rows of a tile of C in elements.
        bn: columns of a tile of C in elements.
        depth: a number that no other family has.
        twist: a word that no other family has.
        halo: a switch of a later version.
        ahead: a launch option.
    """

    family: ClassVar[str] = "sm99_trial_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("halo",)
    launch_knobs: ClassVar[tuple[str, ...]] = (*KernelConfig.launch_knobs, "ahead")
    bm: int
    bn: int
    depth: int = 3
    twist: Literal["left", "right"] = "left"
    halo: bool = False
    ahead: int = 0


OWN = ("depth", "twist", "halo", "ahead")
PLAIN = TrialConfig(64, 32)
TWISTED = TrialConfig(64, 32, depth=5, twist="right", halo=True, ahead=128)
OTHER = Sm80MmaConfig(64, 64)
Load = Callable[[ModuleType], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """With the family registered: gives a module as it is when it is imported after that."""
    monkeypatch.setitem(FAMILIES, TrialConfig.family, SimpleNamespace(name=TrialConfig.family, config=TrialConfig))

    def again(module: ModuleType) -> Any:
        spec = module.__spec__
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, copy)
        spec.loader.exec_module(copy)
        return copy

    return again


def test_the_schema_has_it(load: Load) -> None:
    by_name = knobs_by_name()
    assert [list(by_name[name]) for name in OWN] == [[TrialConfig.family]] * len(OWN)
    assert by_name["twist"][TrialConfig.family].all_values == ("left", "right")
    assert list(by_name["bm"]) == list(FAMILIES) and by_name["ahead"][TrialConfig.family].launch_option
    assert [knob.name for knob in knob_schema(TrialConfig)] == list(PLAIN.knobs()) == ["bm", "bn", *OWN]
    assert PLAIN.changed_knobs() == {} and set(TWISTED.changed_knobs()) == set(OWN)


def test_names_and_json_have_it(load: Load) -> None:
    assert config_name(PLAIN) == "sm99_trial_gemm:bm=64,bn=32,depth=3,twist=left,ahead=0"
    for config in (PLAIN, TWISTED):
        assert config_from_name(config_name(config)) == config
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    assert short_config(TWISTED) == "sm99_trial_gemm 64x32 depth=5 twist=right halo=True ahead=128"


def test_lists_of_values_have_it(load: Load) -> None:
    knobs = knobs_of([PLAIN, TWISTED, OTHER])
    values = {knob.name: knob.values for knob in knobs if TrialConfig.family in knob.families}
    assert values["depth"] == (3, 5) and values["twist"] == ("left", "right") and values["halo"] == (False, True)


def test_evolution_and_tpe_have_it(load: Load) -> None:
    bred = load(evolution)
    assert set(OWN) <= set(bred.KNOBS) and bred.knob_distance(PLAIN, TWISTED) == len(OWN)
    assert bred.knob_distance(PLAIN, TrialConfig(64, 32, twist="right")) == 1
    space = load(tpe)._point(TWISTED)
    assert {name: space[name] for name in OWN} == {"depth": 5, "twist": "right", "halo": True, "ahead": 128}


def test_a_translation_keeps_it(load: Load) -> None:
    assert transfer._core(TWISTED) == transfer._core(TWISTED.with_knobs(bn=64)) != transfer._core(PLAIN)


def test_kernel_tuner_has_it(load: Load, tmp_path: Path) -> None:
    space, files = load(knob_space), load(t4_files)
    assert set(OWN) <= set(space.PARAMETERS)
    for config in (PLAIN, TWISTED, OTHER):
        assert space.config_at(dict(zip(space.PARAMETERS, space.point(config), strict=True))) == config
    assert space.point(OTHER, OWN) == (space.ABSENT,) * len(OWN)
    assert space.point(TWISTED, OWN) == (5, "right", True, 128)
    assert space.tunable([PLAIN, TWISTED, OTHER], ("depth",)) == {"depth": [space.ABSENT, 3, 5]}
    task = files.T4Task(PROBLEM, {config: files.T4Entry(Status.PASSED, 2.0) for config in (PLAIN, TWISTED, OTHER)})
    for text in (json.dumps(files.to_t4(task)), files.to_cache(task)):
        (tmp_path / "task.json").write_text(text)
        assert files.read_task(tmp_path / "task.json") == task


@pytest.mark.parametrize("view", [knob_space.tunable, knob_space.varying])
def test_a_search_space_has_configs(view: Callable[[list[KernelConfig]], object]) -> None:
    with pytest.raises(UsageError, match="the search space has no configs; expected at least one"):
        view([])


def test_what_models_read_and_write_has_it(load: Load) -> None:
    for config in (PLAIN, TWISTED, OTHER):
        assert read_config(write_config(config)) == config
    assert write_config(TrialConfig(64, 32, depth=5)) == {"family": TrialConfig.family, "bm": 64, "bn": 32, "depth": 5}
    said = describe_offered([PLAIN, TWISTED])
    assert "    depth: 3, 5, default 3" in said and "a word that no other family has" in said
    assert "    twist: left, right, default left" in choice_prompt(PROBLEM, H200, [PLAIN, TWISTED], [], 1)[0]["content"]


def test_a_sentence_can_be_of_it(load: Load) -> None:
    language = KnobWords({"bm": (64, 128), "depth": (3, 5)})
    config = language.read(PROBLEM, "bm=128 depth=5")
    assert config == TrialConfig(128, 64, depth=5) and language.write(PROBLEM, config) == "bm=128 depth=5"
    assert language.write(PROBLEM, OTHER) is None


def test_packaged_nets_keep_their_inputs(load: Load) -> None:
    assert TrialConfig.family not in LEARNED_FAMILIES and f"family_{TrialConfig.family}" not in CANDIDATE_FEATURES
    assert not set(OWN) & set(CANDIDATE_FEATURES)
