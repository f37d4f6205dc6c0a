"""benchmarks/inductor_rival.py without a GPU: its problems, its means, and what it says without Triton."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.suites import suite


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("inductor_rival")


def test_each_suite_has_as_many_problems(script: Any) -> None:
    found = script.problems_of(20)
    assert {name: len(set(problems)) for name, problems in found.items()} == {"grid1000": 20, "llm": 20}
    assert all(set(problems) <= set(suite(name)) for name, problems in found.items())


def test_a_row_without_our_kernel_counts_as_1_and_one_that_inductor_fails_does_not_count(script: Any) -> None:
    rows = [
        {"inductor": {"ratio": 0.5}, "ours": {"ratio": 2.0}},
        {"inductor": {"ratio": 0.5}, "ours": None},
        {"inductor": None, "ours": {"ratio": 9.0}},
    ]
    want = {"inductor": 0.5, "ours": 2**0.5, "ours_over_inductor": 8**0.5}
    assert script.means(rows) == pytest.approx(want)


def test_without_triton_it_says_so_in_one_line(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "argv", ["inductor_rival.py", "--out", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit, match="^error: Triton is not installed"):
        script.main()
    assert list(tmp_path.iterdir()) == []
