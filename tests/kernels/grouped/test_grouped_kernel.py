"""Configs, legality and machine code of grouped kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.errors import ProblemError
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, candidates, ctas, make_source, why_illegal
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.sass import check_static

PROBLEM = GroupedProblem(128, 1536, 2048)
DECODE = GroupedConfig(8, 64, 128, 5, min_blocks=2, stream=True)
PREFILL = GroupedConfig(256, 128, 64, 4, 2, cluster=2)
PINGPONG = GroupedConfig(128, 128, 64, 5, 2, pingpong=True)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (PROBLEM, DECODE),
        (PROBLEM, PREFILL),
        (PROBLEM, PINGPONG),
        (replace(PROBLEM, gated=True, bias=True), GroupedConfig(128, 256, 64, 4, 2)),
        (replace(PROBLEM, layout="NN", dtype="fp16"), GroupedConfig(64, 128, 64, 6, 2)),
    ],
)
def test_a_kernel_compiles_with_fp32_sums_and_without_spills(problem: GroupedProblem, config: GroupedConfig) -> None:
    assert why_illegal(problem, config) is None
    source = make_source(problem, config)
    # The host asks for as much shared memory as the kernel uses.
    used = f"static_assert(TABLE_OFFSET + 4 * (1 + 4 * {problem.groups}) == {config.smem_bytes(problem.groups)});"
    threads = f"static_assert(THREADS == {config.threads});"
    cubin = compile_source(replace(source, text=f"{source.text}{used}{threads}"))
    assert check_static(cubin.facts, source, cubin) is None
    assert cubin.facts.accumulators == ("fp32",) and cubin.facts.hgmma


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bn": 12}, "multiple of 8"),
        ({"rows": 96}, "rows must be"),
        ({"bk": 32}, "bk must be"),
        ({"stages": 1}, "stages"),
        ({"consumers": 3}, "consumers must"),
        ({"pingpong": True}, "pingpong needs"),
        ({"consumers": 2, "min_blocks": 1}, "do not divide"),
        ({"cluster": 2}, "cluster"),
        ({"min_blocks": 5}, "CTAs per SM"),
        ({"group": 0}, "group"),
        ({"stages": 12}, "shared memory"),
    ],
)
def test_an_illegal_config_says_why(change: dict[str, int], reason: str) -> None:
    assert reason in (why_illegal(PROBLEM, replace(DECODE, **change)) or "")


def test_a_gate_needs_pairs_of_blocks_and_accumulators_fit() -> None:
    gated = replace(PROBLEM, gated=True)
    assert "even number" in (why_illegal(gated, DECODE) or "")
    assert why_illegal(gated, GroupedConfig(128, 256, 64, 4, 2)) is None
    assert "accumulators" in (why_illegal(PROBLEM, GroupedConfig(256, 256, 64, 2, 2)) or "")


@pytest.mark.parametrize("problem", [PROBLEM, replace(PROBLEM, gated=True), GroupedProblem(256, 512, 7168, "NN")])
def test_candidates_are_legal_and_cover_few_and_many_rows(problem: GroupedProblem) -> None:
    found = list(candidates(problem))
    assert all(why_illegal(problem, one) is None for one in found) and len(set(found)) == len(found)
    assert {one.bn for one in found} >= {8, 64, 128} and {one.cluster for one in found} == {1, 2}


def test_no_launch_has_more_ctas_than_tiles_or_than_are_resident() -> None:
    assert ctas(PROBLEM, DECODE, 1, 132) == 2 * 24, "one row may be in its own tile and end a second one"
    assert ctas(PROBLEM, DECODE, 4096, 132) == 264
    assert ctas(PROBLEM, PREFILL, 131072, 132) == 132


def test_a_problem_that_tma_cannot_read_is_refused() -> None:
    for wrong in ({"k": 2044}, {"n": 1532}, {"groups": 0}, {"groups": 5000}, {"n": 0}):
        with pytest.raises(ProblemError):
            replace(PROBLEM, **wrong)
    assert GroupedProblem(4, 32, 64, gated=True).columns == 16
