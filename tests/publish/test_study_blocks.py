"""The blocks of single studies: without their file, with it, and with a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages.study_blocks import budgets_block, knobs_block

from outblas.core.errors import RecordError


def figures(mean: float) -> dict[str, Any]:
    return {str(b): {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "near": 0.25} for b in (4, 8, 16)}


def result() -> dict[str, Any]:
    means = {"fill": 0.9, "kt-genetic": 0.7, "kt-diffevo": 0.8, "llm": 0.95, "llm as written": 0.5}
    return {
        "format": "outblas-equal-budgets-1", "budgets": [4, 8, 16], "launch": "pdl", "weights": "ab" * 32,
        "chosen": "grid", "recording": {"name": "uncut", "sha256": "cd" * 32, "provenance": {"gpu": "NVIDIA H200"}},
        "provenance": {"date": "2026-12-01T00:00:00", "commit": "c0ffee00c0ffee; beef0000beef"},
        "problems": ["a", "b", "c", "d"], "judged": ["a", "b", "c"],
        "table": [{"learner": name, "seeds": 1, "figures": figures(mean)} for name, mean in means.items()],
        "gains": [{"learner": "llm", "over": "fill", "figures": figures(1.05)}],
        "answers": {"llm": {"answers": 12, "parsed": 7, "written": 3, "copied": 1, "nearest": 9, "filled": 35}},
        "missing": {"llm": 1},
    }  # fmt: skip


def test_without_the_file_no_figure_is_claimed(tmp_path: Path) -> None:
    assert budgets_block(tmp_path / "equal_budgets.json") == "No figures are published yet."


def test_the_best_strategy_of_kernel_tuner_has_a_row_and_each_count_a_place(tmp_path: Path) -> None:
    (path := tmp_path / "equal_budgets.json").write_text(json.dumps(result()))
    text = budgets_block(path)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["fill", "Kernel Tuner, kt-diffevo (best of 2)", "llm", "llm as written"]
    assert "3 problems of NVIDIA H200, launch option pdl" in text and "`llm` lacks 1 of 4 problems" in text
    assert "cells of choice `grid`" in text and "Recording `uncut`" in text and "commit c0ffee00 and beef0000." in text
    assert "12 answers, 7 parsed, 3 written, 1 copied, 9 nearest, 35 filled" in text
    assert "- `llm` over `fill`: 1.050 (1.040 to 1.060)" in text and "abababababababab;" in text


@pytest.mark.parametrize("damage", [{"format": "other"}, {"table": None}, {"recording": {}}])
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    (path := tmp_path / "equal_budgets.json").write_text(json.dumps({**result(), **damage}))
    with pytest.raises(RecordError, match="equal_budgets"):
        budgets_block(path)


def test_a_model_that_learned_knobs_has_its_rates_beside_those_of_choices_without_it(tmp_path: Path) -> None:
    rows = {"parsed": [0.5, 0.4, 0.6], "legal": [0.25, 0.2, 0.3], "recorded": [0.125, 0.1, 0.2]}
    rows |= {"mean_speed": [0.75, 0.7, 0.8], "best_of_samples_speed": [0.875, 0.8, 0.9]}
    names = ("base", "supervised", "speed", "random_recorded", "most_frequent", "nearest_problem")
    data = {
        "settings": {"samples": 8, "supervised_steps": 40, "speed_steps": 20, "threads": 2},
        "problems": {"training": 90, "held_out": ["a", "b"]}, "evaluations": dict.fromkeys(names, rows),
        "curves": {"supervised": [{"loss": 50.0 - i} for i in range(40)],
                   "speed": [{"reward": i - 20.0} for i in range(20)]},
        "seconds": {"a": 60.0, "b": 120.0}, "provenance": {"date": "2026-12-01T00:00:00", "commit": "c0ffee"},
    }  # fmt: skip
    (path := tmp_path / "knob_training.json").write_text(json.dumps(data))
    text = knobs_block(path)
    row = "| after GRPO | 50.0% | 25.0% | 12.5% | 0.750 (0.700 to 0.800) | 0.875 (0.800 to 0.900) |"
    assert row in text and "2 held-out problems, 8 answers each; 90 training problems" in text
    assert "goes from 45.50 to 15.50, and the reward of GRPO goes from -15.50 to -5.50" in text and "3 minutes" in text
    path.write_text(json.dumps({**data, "evaluations": {}}))
    with pytest.raises(RecordError, match="knob_training"):
        knobs_block(path)
