"""benchmarks/grouped_products.py: which candidates suit a problem, and what counts as right."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from outblas.kernels.grouped.grouped_kernel import candidates
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from support.gpus.known import H200
from support.helpers import ROOT, module_of_file

torch = pytest.importorskip("torch")


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return module_of_file(ROOT / "benchmarks" / "grouped_products.py", monkeypatch)


def test_every_problem_has_candidates_near_its_groups(bench: Any) -> None:
    for one in bench.moe_suite():
        heights = {config.bn for config in candidates(one.problem) if bench.suits(one, config)}
        assert heights, one.key
        assert max(heights) <= 16 or one.tokens >= 64, one.key
        assert min(heights) >= 48 or one.tokens < 16384, one.key


def test_a_wrong_element_of_a_group_is_found(bench: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    made = bench.OperandSet.__new__(bench.OperandSet)
    made.rows = [3, 0, 5]
    made.a = torch.randn(8, 64, generator=generator).bfloat16()
    made.w = torch.randn(3, 16, 64, generator=generator).bfloat16()
    begins = [0, *itertools.accumulate(made.rows)]
    parts = [made.a[b:e] @ made.w[g].T for g, (b, e) in enumerate(itertools.pairwise(begins))]
    made.c = torch.cat(parts)
    assert made.wrong() == ""
    made.c[4, 7] += 0.5
    assert made.wrong().startswith("group 2 of 5 rows is off")
    made.c[4, 7] = float("nan")
    assert made.wrong()


def test_the_suite_has_sixty_problems_half_of_them_by_zipf(bench: Any) -> None:
    suite = bench.moe_suite()
    assert len({one.key for one in suite}) == 60
    assert Counter(one.routing for one in suite) == {"uniform": 30, "zipf": 30}
    assert {one.problem.bias for one in suite if one.model == "gpt-oss-20b"} == {True}
    for one in suite:
        assert one.problem.columns == one.problem.n


def test_every_token_goes_to_different_experts(bench: Any) -> None:
    rows_of_groups, model = bench.rows_of_groups, bench.MODELS["deepseek-v2-lite"]
    for routing in ("uniform", "zipf"):
        rows = rows_of_groups(model, 200, routing, 7)
        assert sum(rows) == 200 * model.top and max(rows) <= 200
        assert rows == rows_of_groups(model, 200, routing, 7) != rows_of_groups(model, 200, routing, 8)
    uniform, zipf = (max(rows_of_groups(model, 2000, routing, 7)) for routing in ("uniform", "zipf"))
    assert zipf > 3 * uniform


def test_the_floor_counts_only_weights_that_are_hit(bench: Any) -> None:
    problem = GroupedProblem(128, 1536, 2048)
    one, all_groups = [8, *[0] * 127], [1] * 128
    few, many = (bench.floor_us(problem, rows, H200) for rows in (one, all_groups))
    assert many == pytest.approx(128 * 1536 * 2048 * 2 / (H200.hbm_tbs * 1e6), rel=0.02) and few < many / 100
    assert bench.floor_us(problem, [4096] * 128, H200) == pytest.approx(2e-6 * 128 * 4096 * 1536 * 2048 / H200.tflops)
