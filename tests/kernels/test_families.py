"""Rules for every kernel family. A new family gets these tests without further work."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from outblas.core.config import (
    LAUNCHES,
    KernelConfig,
    config_name,
    config_to_json,
    knob_schema,
    launch_allows,
    launch_of,
)
from outblas.core.errors import ConfigError
from outblas.core.problem import ROW_ALIGN_BYTES, Problem
from outblas.kernels.catalogue import candidates, even_twin
from outblas.kernels.config_text import config_from_json, config_from_name
from outblas.kernels.cost.columns import COLUMN_DEFAULTS, config_columns
from outblas.kernels.cost.cost_model import FEATURE_NAMES, START_COEFFICIENTS, predict_many
from outblas.kernels.families.family import LAST_PLACE, Family, TileChoice
from outblas.kernels.families.registry import _FIRST, FAMILIES, family_modules
from outblas.kernels.geometry import geometry, grid, k_tiles, workspace_bytes
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import mma_pool, pool, unaligned_pool
from outblas.kernels.proof_shapes import proof_shapes
from outblas.kernels.source import kernel_headers, make_source
from outblas_lab.build.refine import neighbours
from outblas_lab.pool.knobs import all_knobs
from support.family_tools import device_constants
from support.gpus.known import H200
from support.helpers import ROOT

PACKAGE = ROOT / "src" / "outblas"
FOLDER = PACKAGE / "kernels" / "families"
KINDS = (("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16"))
EXTENTS = ((4096, 4096, 8192), (512, 512, 8192), (8, 4096, 4096), (16, 4096, 4096))
PROBLEMS = tuple(Problem(*mnk, *kind) for mnk in EXTENTS for kind in KINDS)  # type: ignore[arg-type]

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@cache
def legal_pairs(name: str) -> tuple[tuple[Problem, KernelConfig], ...]:
    """Legal pairs of a family: a part of its pool, each on the first problem that it can run."""
    mine = list(dict.fromkeys(FAMILIES[name].pool()))
    pairs = (
        (next((p for p in PROBLEMS if why_illegal(p, c, H200) is None), None), c) for c in mine[:: len(mine) // 12 or 1]
    )
    return tuple((problem, config) for problem, config in pairs if problem is not None)


def mutants(family: Family[KernelConfig]) -> Iterator[KernelConfig]:
    """Configs with one knob that is out of its range, or another word."""
    for _, config in legal_pairs(family.name)[:3]:
        for knob in knob_schema(family.config):
            values = {"bool": (True, False), "int": (-1, 0, 1, 3, 7, 4096), "word": knob.words}[knob.kind]
            yield from (config.with_knobs(**{knob.name: value}) for value in values)


def module_of(family: Family[KernelConfig]) -> Path:
    """The module of a family, in the folder of families or in a package of its own there."""
    path = Path(inspect.getfile(type(family)))
    assert path.is_relative_to(FOLDER)
    return path


@every_family
def test_its_kernel_file_its_module_and_its_name_are_one(family: Family[KernelConfig]) -> None:
    assert family.name == family.config.family and FAMILIES[family.name] is family
    assert module_of(family).stem == family.name
    assert f"{family.name}.cuh" in {name for name, _ in kernel_headers()}
    assert re.fullmatch(r"sm\d+_[a-z0-9]+_[a-z0-9]+", family.name), "<arch>_<instruction>_<op>"


@every_family
def test_its_knobs_are_typed_documented_and_have_the_launch_options(family: Family[KernelConfig]) -> None:
    schema = {knob.name: knob for knob in knob_schema(family.config)}
    assert {"bm", "bn", "pdl", "early"} <= set(schema)
    said = (family.config.__doc__ or "").partition("Attributes:")[2]
    for knob in schema.values():
        assert re.search(rf"\b{knob.name}\b", said), f"{knob.name} is not documented"
        assert bool(knob.words) == (knob.kind == "word")
        assert not knob.later or knob.default is not None
    assert set(family.config.later_knobs) <= set(schema)
    later = [knob.later for knob in knob_schema(family.config)]
    assert later == sorted(later), "later knobs come last"


@every_family
def test_names_and_json_lead_back_and_what_is_damaged_is_refused(family: Family[KernelConfig]) -> None:
    assert legal_pairs(family.name)
    for _, config in legal_pairs(family.name):
        for other in (config, config.with_knobs(pdl=True), config.with_knobs(pdl=True, early=True)):
            assert config_from_name(config_name(other)) == other == config_from_json(config_to_json(other))
            assert launch_of(other) in LAUNCHES and launch_allows("weights", other)
        assert all(getattr(config, k.name) in k.values for k in all_knobs() if config.family in k.families)
        with pytest.raises(ConfigError):
            config_from_json({**config_to_json(config), "no_such_knob": 1})
        with pytest.raises(ConfigError):
            config_from_json({**config_to_json(config), "bm": "64"})


@every_family
def test_whatever_its_knobs_are_there_is_an_answer_and_a_reason(family: Family[KernelConfig]) -> None:
    reasons = set()
    for config in mutants(family):
        for problem in (PROBLEMS[0], PROBLEMS[4], PROBLEMS[6], PROBLEMS[10]):
            reason = why_illegal(problem, config, H200)
            assert reason is None or (isinstance(reason, str) and reason)
            if reason is None:
                shape = geometry(problem, config)
                assert shape.smem_bytes <= H200.smem_optin and shape.threads <= 1024 and shape.threads % 32 == 0
            reasons.add(reason)
    assert None in reasons and len(reasons) > 4
    problem, config = legal_pairs(family.name)[0]
    assert why_illegal(problem, config.with_knobs(early=True, pdl=False), H200) is not None
    assert why_illegal(problem, config, replace(H200, arch=75)) is not None


@every_family
def test_its_part_of_the_pool_is_legal_somewhere_and_has_no_launch_options(family: Family[KernelConfig]) -> None:
    mine = list(family.pool())
    assert mine and all(type(config) is family.config for config in mine)
    its = mma_pool() if family.without_wgmma else unaligned_pool() if family.for_unaligned_rows else pool()
    assert set(mine) <= set(its) and not any(config.pdl or config.early or config.even for config in mine)
    assert len(legal_pairs(family.name)) >= min(len(mine), 12), "a part of the pool is legal nowhere"


@every_family
def test_its_figures_are_those_of_its_problem_alone(family: Family[KernelConfig]) -> None:
    for problem, config in legal_pairs(family.name):
        shape = geometry(problem, config)
        assert geometry(Problem(8, 16, 24, problem.layout, problem.dtype, problem.acc), config) == shape
        ctas = grid(problem, config, H200.sms)
        assert len(ctas) == 3 and min(ctas) >= 1 and ctas[0] % shape.cluster == 0
        assert k_tiles(problem, config) >= config.split_k and workspace_bytes(problem, config) >= 0
        assert len(family.tensor_boxes(problem, config)) in (0, 3 if family.combs == 1 else 2)
        assert family.alignment(config) in (2, 4, 8, ROW_ALIGN_BYTES)
        assert not family.without_early(config.with_knobs(pdl=True, early=True)).early


@every_family
def test_the_device_code_has_the_same_figures(family: Family[KernelConfig]) -> None:
    pytest.importorskip("cuda.bindings")
    for problem, config in legal_pairs(family.name)[::4]:
        shape = geometry(problem, config)
        assert device_constants(problem, config) == (shape.smem_bytes, shape.threads)


@every_family
def test_one_of_its_kernels_compiles_and_passes_the_static_gate(family: Family[KernelConfig]) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    problem, config = legal_pairs(family.name)[0]
    source = make_source(problem, config)
    assert source.entry == source.family == family.name
    cubin = compile_source(source)
    assert check_static(cubin.facts, source, cubin) is None


@every_family
def test_what_is_near_is_legal_and_another_config(family: Family[KernelConfig]) -> None:
    for problem, config in legal_pairs(family.name)[::3]:
        for start in (config, config.with_knobs(pdl=True)):
            found = neighbours(problem, start, H200)
            assert found and start not in found and len(set(found)) == len(found)
            assert all(why_illegal(problem, c, H200) is None and c.family == family.name for c in found)
        twin = even_twin(problem, config.with_knobs(pdl=True), H200)
        assert twin is None or (family.has_even and twin.even)


@every_family
def test_it_is_proved_on_problems_that_it_can_run(family: Family[KernelConfig]) -> None:
    for problem, config in legal_pairs(family.name)[::3]:
        found = proof_shapes(problem, config, H200)
        assert len(found) >= 2 and all(why_illegal(p, config, H200) is None for p in found)
        assert {(p.layout, p.dtype, p.acc) for p in found} == {(problem.layout, problem.dtype, problem.acc)}


@every_family
def test_what_it_offers_beside_the_catalogue_is_its_own(family: Family[KernelConfig]) -> None:
    for problem in (*PROBLEMS, Problem(127, 1001, 333)):
        found = [*family.special_candidates(problem, H200), *family.unaligned_candidates(problem, H200, ())]
        assert all(type(config) is family.config for config in found)
        assert all(c.family in FAMILIES for c in candidates(problem, H200)[:50])
    assert all(c.family == family.name for _, c in family.special_kernel_kinds())
    near = [c for c, _ in zip(family.near_tile_choice(TileChoice(128, 128, 64, 4, 1, 1, 1, 0)), range(3), strict=False)]
    assert bool(near) is family.follows_heuristics


@every_family
def test_its_cost_is_finite_and_positive_and_its_columns_have_a_place(family: Family[KernelConfig]) -> None:
    assert START_COEFFICIENTS[family.name] and all(
        math.isfinite(value) for value in START_COEFFICIENTS[family.name].values()
    )
    configs = [config for _, config in legal_pairs(family.name)]
    assert set(config_columns(configs, H200)) == {*COLUMN_DEFAULTS, *family.own_columns}
    for problem, config in legal_pairs(family.name):
        (us,) = predict_many(problem, [config], H200)
        assert 0 < us < 1e6
        assert family.transposed(family.transposed(config)) == config
    assert {f"{kind}.one" for kind in family.kinds} <= set(FEATURE_NAMES)


def test_places_are_taken_once() -> None:
    for place in ("pool_place", "offer_place", "residual_place"):
        taken = [n for n in (getattr(family, place) for family in FAMILIES.values()) if n != LAST_PLACE]
        assert len(set(taken)) == len(taken), place


def modules_outside() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(FOLDER)]


def code_of(path: Path) -> str:
    """Return a module's text without docstrings and comments."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def test_no_module_outside_names_a_family() -> None:
    """By type or by string: what knows a family lives beside it. Docstrings and comments may give one as an example."""
    names = [word for family in FAMILIES.values() for word in (family.name, family.config.__name__)]
    said = re.compile("|".join(names))
    naming = [path for path in modules_outside() if said.search(path.read_text("utf-8"))]
    assert [str(path.relative_to(PACKAGE)) for path in naming if said.search(code_of(path))] == []
    assert naming, "a docstring gives an example"


def test_the_registry_finds_a_family_by_the_name_of_its_module(tmp_path: Path) -> None:
    wide = tmp_path / "sm90_wide"
    wide.mkdir()
    names = ("sm99_new_gemm.py", "sm80_old_gemm.py", "family.py", "sm80_old_gemm.cuh", "sm90_wide/sm90_wide_gemm.py")
    for name in (*names, "sm90_wide/__init__.py", "sm90_wide/wide_cost.py"):
        (tmp_path / name).touch()
    found = family_modules(tmp_path)
    assert found == ["sm80_old_gemm", "sm90_wide.sm90_wide_gemm", "sm99_new_gemm"]
    assert family_modules(tmp_path, found[2:]) == [found[2], *found[:2]]
    assert set(family_modules(FOLDER)) == set(family_modules(FOLDER, _FIRST)) and len(FAMILIES) >= len(_FIRST)


def test_families_know_nothing_of_each_other() -> None:
    for family in FAMILIES.values():
        module = module_of(family)
        own = [module] if module.parent == FOLDER else module.parent.glob("*.py")
        text = "".join(path.read_text("utf-8") for path in own)
        assert not [other for other in FAMILIES if other != family.name and other in text]
