"""Notes on single rows: kernels that failed, rivals without a time, and times that are hard to believe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages.all_rows_table import notes_of_rows

from outblas.records.results import Result
from support.bench_fixture import META, make_rows

RIVALS = ("torch_us", "cublas_us", "lt_heuristic_us", "lt_auto_us")


def result(*changes: dict[str, Any]) -> Result:
    """A bench of a row for each change, far above its floor and with a time of every rival."""
    row = next(row for row in make_rows((64, 128)) if not row["fallback"])
    whole = {**row, **dict.fromkeys(RIVALS, 9.0), "floor_us": 2.0, "ours_us": 4.0, "pdl": False, "early": False}
    return Result(Path("grid.parquet"), META, [{**whole, **change} for change in changes])


def test_rows_of_which_all_was_timed_have_no_note() -> None:
    assert notes_of_rows([result({}, {"ours_us": 1.95})]) == []


def test_a_kernel_that_failed_is_told() -> None:
    wrong = {"status": "wrong", "fallback": True, "config": "", "published": 1.0}
    (line,) = notes_of_rows([result({}, wrong, {**wrong, "status": "hang"}, wrong)])
    assert line.endswith("of 4 rows the library's kernel failed and has no result: wrong in 2, hang in 1")


def test_a_rival_that_failed_is_told() -> None:
    (line,) = notes_of_rows([result({}, {"lt_auto_us": None}, {"lt_auto_us": None, "torch_us": None})])
    assert line == (
        "- grid1000 TN fp16/fp32, offline: of 3 rows a rival has no time: autotuned cuBLASLt in 2, torch.matmul in 1"
    )


def test_mode_block_leaves_rivals_out_on_purpose() -> None:
    assert notes_of_rows([result({"mode": "block", "cublas_us": None})]) == []


@pytest.mark.parametrize(("rival", "count"), [(9.0, 2), (0.8, 1)])
def test_implausible_times_are_counted_unless_a_rival_is_as_fast(rival: float, count: int) -> None:
    """The least time of a launch that overlaps the one before it is shorter."""
    fast = {"ours_us": 0.85, "pdl": True, "lt_auto_us": rival}
    (line,) = notes_of_rows([result({"ours_us": 0.95, "pdl": True}, {"ours_us": 0.75}, fast)])
    assert line.startswith(f"- {count} of 3 rows take less than 97% of the least plausible time")
