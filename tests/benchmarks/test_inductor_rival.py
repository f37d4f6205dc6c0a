"""benchmarks/inductor_rival.py without a GPU: its problems, its means, and what it says without Triton."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.runtime import device


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


def test_a_problem_of_both_suites_has_a_row_in_each_also_after_an_interruption(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, other = suite("llm")[:2]
    asked: list[str] = []

    def measured(problem: Problem, *_: Any) -> dict[str, Any]:
        asked.append(problem.key)
        if len(asked) == 2:
            raise KeyboardInterrupt
        figures = {"ratio": 1.0 + len(asked)}
        return {"problem": problem.key, "inductor": figures, "ours": figures, "refused": None}

    monkeypatch.setattr(device, "gpu_of_device", lambda index: script.H200)
    monkeypatch.setattr(script, "problems_of", lambda count: {"grid1000": [both], "llm": [both, other]})
    monkeypatch.setattr(script, "make_baselines", lambda *_: {})
    monkeypatch.setattr(script, "measure_one", measured)
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        script.measure(2, out)
    result = script.measure(2, out)
    assert asked == [both.key, both.key, both.key, other.key], "the first row was kept"
    rows = [(row["suite"], row["problem"]) for row in result["rows"]]
    assert rows == [("grid1000", both.key), ("llm", both.key), ("llm", other.key)]
    assert list(json.loads(out.read_text())) == ["format", "provenance", "means", "rows"]
    assert set(result["means"]) == {"grid1000", "llm"} and list(tmp_path.iterdir()) == [out]


def test_without_triton_it_says_so_in_one_line(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "argv", ["inductor_rival.py", "--out", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit, match="^error: Triton is not installed"):
        script.main()
    assert list(tmp_path.iterdir()) == []
