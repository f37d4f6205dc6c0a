"""What is near a good config: legal, different, and something of every idea first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.config import LAUNCHES, KernelConfig
from outblas.evaluation import Evaluation, Speedup, Status, Timing
from outblas.kernels.catalogue import candidates, catalogue, launch_options, worth_trying
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.neighbours import neighbours
from outblas.problem import Problem
from outblas.roofline import H200
from outblas.second_search import near_the_best

TILE = Sm90WgmmaConfig(128, 128, stages=5, consumers=2, cluster_m=2)
SPLIT = Sm90WgmmaConfig(64, 64, 128, 4, split_k=3, store="direct")


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("config", catalogue()[::17])
def test_all_are_legal_and_none_is_the_config_itself(config: KernelConfig, layout: str) -> None:
    problem = Problem(1024, 2048, 2048, layout)  # type: ignore[arg-type]
    if why_illegal(problem, config):
        pytest.skip("not legal itself")
    found = neighbours(problem, config)
    assert config not in found and len(set(found)) == len(found)
    assert all(why_illegal(problem, c) is None and c.pdl is config.pdl for c in found)
    dependent = replace(config, pdl=True)
    first, *others = neighbours(problem, dependent)
    assert first == replace(dependent, early=True) and not any(c.early for c in others)
    assert all(c.early for c in neighbours(problem, first))


def test_a_short_list_has_something_of_every_idea() -> None:
    first = neighbours(Problem(4096, 4096, 4096), TILE)[:4]
    assert {c.l2 for c in first} >= {"stream_b"}  # type: ignore[union-attr]
    assert any(c.raster != TILE.raster for c in first)  # type: ignore[union-attr]
    assert any((c.cluster_m, c.cluster_n) != (2, 1) for c in first)  # type: ignore[union-attr]


def test_the_larger_operand_is_the_one_that_streams() -> None:
    for problem, once in ((Problem(4096, 64, 4096), "a"), (Problem(64, 4096, 4096), "b")):
        hints = [c.l2 for c in neighbours(problem, Sm90WgmmaConfig(64, 64)) if c.l2 != "plain"]  # type: ignore[union-attr]
        assert hints[0] == f"stream_{once}" and f"stream_{once}c" in hints and "stream_c" in hints
        direct = neighbours(problem, Sm90WgmmaConfig(64, 64, store="direct"))
        assert not {c.l2 for c in direct} & {"stream_c", f"stream_{once}c"}  # type: ignore[union-attr]


def test_a_split_may_move_to_a_workspace_and_back() -> None:
    problem = Problem(256, 512, 12288)
    there = replace(SPLIT, split_kind="workspace")
    assert there in neighbours(problem, SPLIT) and SPLIT in neighbours(problem, there)


def test_ctas_may_walk_keep_their_tokens_and_go_back() -> None:
    problem = Problem(8, 8192, 4096)
    still = Sm80GemvConfig(8, 16, 1, 8, 4)
    walking = replace(still, persistent=True)
    for config in (still, walking):
        found = neighbours(problem, config)
        assert {replace(walking, kept_k=4096), replace(config, l2="stream_b")} <= set(found)
        assert not any(isinstance(c, Sm80GemvConfig) and c.kept_k == 2048 for c in found)
    assert still in neighbours(problem, walking) and walking in neighbours(problem, still)


@pytest.mark.parametrize(
    "config", [Sm80GemvConfig(8, 64, 1, 8, 2, split_k=2), Sm80DirectConfig(32, 32, 1, 1, 2, 2), Sm80MmaConfig(64, 64)]
)
def test_every_family_has_some(config: KernelConfig) -> None:
    assert len(neighbours(Problem(8, 1024, 4096), config)) >= 3


def evaluation(problem: Problem, config: KernelConfig, ratio: float) -> Evaluation:
    timing, speedup = Timing("offline", (1.0,) * 3, 1.0, 0.0), Speedup("torch", ratio, ratio, ratio)
    return Evaluation(problem, config, Status.PASSED, timing=timing, speedup=speedup)


def test_near_the_best_takes_the_options_in_turns_and_nothing_twice() -> None:
    problem = Problem(512, 512, 512)
    slow, best, wrong = replace(TILE, group=4), TILE, replace(TILE, raster="n")
    tried = [
        evaluation(problem, slow, 0.9),
        evaluation(problem, best, 1.1),
        Evaluation(problem, wrong, Status.WRONG),
    ]
    tried += [evaluation(problem, replace(slow, pdl=True), 1.3)]
    found = near_the_best(problem, tried, H200)
    assert [c.pdl for c in found[:4]] == [False, True, False, True]
    assert not {e.config for e in tried} & set(found)
    assert set(found) <= {*neighbours(problem, best), *neighbours(problem, replace(slow, pdl=True))}
    assert near_the_best(problem, [], H200) == []


@pytest.mark.parametrize("config", [Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8), Sm80DirectConfig(16, 16, wk=4)])
def test_ctas_may_be_spread_evenly_and_stack_again(config: KernelConfig) -> None:
    problem, pdl = Problem(16, 4096, 4096), replace(config, pdl=True)
    even = replace(pdl, even=True)
    assert even in neighbours(problem, pdl)[:3] and pdl in neighbours(problem, even)[:3]
    assert sum(c.even for c in neighbours(problem, pdl)) == 1
    assert replace(even, early=True) in neighbours(problem, replace(pdl, early=True))
    assert not any(c.even for c in neighbours(problem, config)), "without PDL they spread by themselves"
    many = Problem(4096, 4096, 4096)
    assert not any(c.even for c in neighbours(many, pdl)), "an SM's share is more than fits"


def test_even_kernels_are_offered_to_live_searches_where_pdl_is_anything() -> None:
    problem = Problem(16, 4096, 4096)
    found, plain = worth_trying(problem, H200), candidates(problem)
    even = [c for c in found if c.even]
    assert even and not any(c.even for c in plain) and found[-len(even) :] == even
    assert {c.early for c in even} == {False, True} and len(set(found)) == len(found)
    assert all(why_illegal(problem, c) is None and replace(c, even=False) in found for c in even)
    assert candidates(problem, even=True) == plain + [c for c in even if not c.early]
    assert not any(c.even for c in worth_trying(Problem(16384, 16384, 16384), H200))


def test_launch_options_are_left_where_they_are_nothing() -> None:
    assert launch_options(Problem(64, 64, 64), H200) == LAUNCHES
    assert launch_options(Problem(16384, 16384, 16384), H200) == ("plain",)
    assert launch_options(Problem(1024, 1024, 4096), H200) == ("plain", "pdl"), "compute-bound"
    assert launch_options(Problem(8, 28672, 8192), H200) == ("plain",), "the floor is 112 us"
    assert launch_options(Problem(8, 10240, 8192), H200) == ("plain", "weights")


def test_early_loads_are_offered_where_they_may_matter() -> None:
    for problem in (Problem(1024, 1024, 4096), Problem(8, 4096, 4096)):
        found, plain = [c for c in worth_trying(problem, H200) if not c.even], candidates(problem)
        assert found[: len(plain)] == plain and not any(c.early for c in plain)
        early = [c for c in found if c.early]
        assert set(found) == {*plain, *early} and bool(early) == (problem.m == 8)
        assert all(why_illegal(problem, c) is None and replace(c, early=False) in plain for c in early)
