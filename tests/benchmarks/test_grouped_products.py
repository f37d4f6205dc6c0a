"""benchmarks/grouped_products.py: which candidates suit a problem, and what counts as right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outblas.kernels.grouped.grouped_kernel import candidates
from outblas.kernels.grouped.moe_suite import moe_suite
from support.helpers import ROOT, module_of_file

torch = pytest.importorskip("torch")


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "benchmarks" / "grouped_products.py", monkeypatch)


def test_every_problem_has_candidates_near_its_groups(bench: Any) -> None:
    for one in moe_suite():
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
