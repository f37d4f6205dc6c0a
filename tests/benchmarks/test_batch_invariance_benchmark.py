"""benchmarks/batch_invariance.py without a GPU: its weights, its means, and what it says without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from outblas.core.suites import suite


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("batch_invariance")


def test_weights_of_models_and_random_ones_come_in_turns(script: Any) -> None:
    drawn = list(script.weights(16))
    assert drawn == list(script.weights(16)) and len(set(drawn)) == 16
    known = {(p.n, p.k) for p in suite("llm")}
    assert all((p.n, p.k) in known for p in drawn[::2])
    assert {p.rows_aligned for p in drawn[1::2]} == {True, False}
    assert len({(p.layout, p.dtype) for p in drawn}) == 4


def test_means_are_of_the_times_over_ours(script: Any) -> None:
    verdicts = {"outblas": {"invariant": True}, "torch": {"invariant": False}}
    rows = [
        {"n": n, "k": 4096, "verdicts": verdicts, "times": [{"m": 1, "us": {"outblas": 1.0, "torch": ratio}}]}
        for n, ratio in ((4096, 2.0), (4097, 0.5), (4097, 1.0))
    ]
    rows[0]["times"].append({"m": 16, "us": {"outblas": 1.0, "torch": 8.0}})
    found = script.means(rows)
    assert found["invariant"] == {"outblas": 3, "torch": 0}
    over = {group: others["torch"] for group, others in found["speedup_over"].items()}
    assert over == {"llm": {"1": 2.0, "16": 8.0, "all": 4.0}, "all weights": {"1": 1.0, "16": 8.0, "all": 1.6818}}


def test_an_entry_of_the_clock_has_a_name(script: Any) -> None:
    assert script.IntoOutput("torch", None, None).name == "torch"


def test_without_a_gpu_it_says_so_in_one_line(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="^error: "):
        script.main(["--out", str(tmp_path / "r.json")])
    assert not (tmp_path / "r.json").exists()
