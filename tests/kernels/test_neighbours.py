"""Neighbours of a good config: legal, different, and with some of every idea first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import LAUNCHES, KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates, catalogue, first_search_candidates, launch_options
from outblas.kernels.legality import why_illegal
from outblas_lab.build.refine import neighbours
from support.gpus.known import H200


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("config", catalogue("h200")[::17])
def test_all_are_legal_and_none_is_the_config_itself(config: KernelConfig, layout: str) -> None:
    problem = Problem(1024, 2048, 2048, layout)  # type: ignore[arg-type]
    if why_illegal(problem, config, H200):
        pytest.skip("not legal itself")
    found = neighbours(problem, config, H200)
    assert config not in found and len(set(found)) == len(found)
    assert all(why_illegal(problem, c, H200) is None and c.pdl is config.pdl for c in found)
    dependent = replace(config, pdl=True)
    first, *others = neighbours(problem, dependent, H200)
    assert first == replace(dependent, early=True) and not any(c.early for c in others)
    assert all(c.early for c in neighbours(problem, first, H200))


def test_even_kernels_are_offered_to_live_searches_where_pdl_is_anything() -> None:
    problem = Problem(16, 4096, 4096)
    found, plain = first_search_candidates(problem, H200), candidates(problem, H200)
    even = [c for c in found if c.even]
    assert even and not any(c.even for c in plain) and found[-len(even) :] == even
    assert {c.early for c in even} == {False, True} and len(set(found)) == len(found)
    assert all(why_illegal(problem, c, H200) is None and replace(c, even=False) in found for c in even)
    assert candidates(problem, H200, even=True) == plain + [c for c in even if not c.early]
    assert not any(c.even for c in first_search_candidates(Problem(16384, 16384, 16384), H200))


def test_launch_options_are_left_where_they_are_nothing() -> None:
    assert launch_options(Problem(64, 64, 64), H200) == LAUNCHES
    assert launch_options(Problem(16384, 16384, 16384), H200) == ("plain",)
    assert launch_options(Problem(1024, 1024, 4096), H200) == ("plain", "pdl"), "compute-bound"
    assert launch_options(Problem(8, 28672, 8192), H200) == ("plain",), "the floor is 112 us"
    assert launch_options(Problem(8, 10240, 8192), H200) == ("plain", "weights")


def test_early_loads_are_offered_where_they_may_matter() -> None:
    for problem in (Problem(1024, 1024, 4096), Problem(8, 4096, 4096)):
        found, plain = [c for c in first_search_candidates(problem, H200) if not c.even], candidates(problem, H200)
        assert found[: len(plain)] == plain and not any(c.early for c in plain)
        early = [c for c in found if c.early]
        assert set(found) == {*plain, *early} and bool(early) == (problem.m == 8)
        assert all(why_illegal(problem, c, H200) is None and replace(c, early=False) in plain for c in early)
