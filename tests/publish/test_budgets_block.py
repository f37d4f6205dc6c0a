"""The block of learners on equal budgets: without the file, with it, and with a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages.study_blocks import budgets_block

from outblas.core.errors import RecordError


def figures(mean: float) -> dict[str, Any]:
    return {str(b): {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "near": 0.25} for b in (4, 8, 16)}


def result() -> dict[str, Any]:
    means = {"fill": 0.9, "kt-genetic": 0.7, "kt-diffevo": 0.8, "llm": 0.95, "llm as written": 0.5}
    return {
        "format": "outblas-equal-budgets-1", "budgets": [4, 8, 16], "launch": "pdl", "weights": "ab" * 32,
        "recording": {"sha256": "cd" * 32, "provenance": {"gpu": "NVIDIA H200"}},
        "provenance": {"date": "2026-12-01T00:00:00", "commit": "c0ffee"},
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
    assert "12 answers, 7 parsed, 3 written, 1 copied, 9 nearest, 35 filled" in text
    assert "- `llm` over `fill`: 1.050 (1.040 to 1.060)" in text and "abababababababab;" in text


@pytest.mark.parametrize("damage", [{"format": "other"}, {"table": None}, {"recording": {}}])
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    (path := tmp_path / "equal_budgets.json").write_text(json.dumps({**result(), **damage}))
    with pytest.raises(RecordError, match="equal_budgets"):
        budgets_block(path)
