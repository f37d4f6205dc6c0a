"""The problems of benchmarks/llm_tp_drawn.py: M of every weight that no suite chose, and what the package decides."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.suites import suite
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from support.gpus.known import H200


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch", reason="the script fits choices by torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("llm_tp_drawn")


def test_each_weight_of_the_suite_has_drawn_m(script: Any) -> None:
    drawn = script.problems(12, 5, "bf16")
    assert drawn == script.problems(12, 5, "bf16") != script.problems(12, 6, "bf16")
    assert len(set(drawn)) == len(drawn) == 29 * 12 and {p.dtype for p in drawn} == {"bf16"}
    assert {(p.n, p.k) for p in drawn} == {(p.n, p.k) for p in suite("llm_tp")}
    below = sum(p.m <= 128 for p in drawn)
    assert 0.3 < below / len(drawn) < 0.7 and min(p.m for p in drawn) <= 4 and max(p.m for p in drawn) > 8192


def test_the_interval_decides_and_the_package_where_it_leaves_an_m_open(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = importlib.import_module("interval_check")
    asked, packaged = script.problems(12, 5, "fp16"), Library.packaged("h200")
    seen: list[Any] = []

    def package(problems: Any, gpu: Any) -> Any:
        seen.extend(problems)
        return SimpleNamespace(rows=[LibraryRow(problem, "torch") for problem in problems])

    monkeypatch.setattr(checks, "shipped_library", package)
    library = script.library_of_package(asked, H200)
    assert [row.problem for row in library.rows] == asked
    for row in library.rows:
        known = packaged.lookup(row.problem)
        assert (row.problem in seen) == (known is None or known.is_open)
        assert known is None or row.plain == known.plain
    assert 0 < len(seen) < len(asked)
