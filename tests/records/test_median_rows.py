"""Rows of several starts of the machine, joined by the median."""

from __future__ import annotations

from typing import Any

import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.stats import geomean
from outblas.records.results import median_rows, read_result, write_result
from outblas_lab.publish.summary import summarise
from support.bench_fixture import META, make_rows


def starts(factors: tuple[float, ...]) -> list[list[dict[str, Any]]]:
    """Return one bench per factor: its kernels are that much faster."""
    rows = [row for row in make_rows((64, 128), pdls=(False,)) if not row["fallback"]]
    return [
        [
            {**row, "ours_us": row["ours_us"] / f, "speedup": row["speedup"] * f, "published": row["speedup"] * f}
            for row in rows
        ]
        for f in factors
    ]


def test_a_row_is_the_whole_row_of_the_median_start() -> None:
    first, second, third = starts((1.02, 1.0, 0.95))
    found = median_rows([first, second[::-1], third])
    want = [
        {**row, "by_start": [a["published"], row["published"], b["published"]]}
        for a, row, b in zip(first, second, third, strict=True)
    ]
    assert found == want


def test_the_summary_has_the_interval_between_starts(tmp_path: Any) -> None:
    benches = starts((1.02, 1.0, 0.95))
    path = write_result(median_rows(benches), META, tmp_path / "r.parquet")
    (row,) = summarise(path)
    means = [round(geomean(r["published"] for r in rows), 6) for rows in benches]
    assert (row["starts"], row["interval"]) == (3, [min(means), max(means)])
    assert row["geomean"] == means[1]
    assert read_result(path).rows[0]["by_start"] == [rows[0]["published"] for rows in benches]


def test_starts_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    first, second, third = starts((1.02, 1.0, 0.95))
    with pytest.raises(UsageError, match="odd number"):
        median_rows([first, second])
    with pytest.raises(UsageError, match="have different problems"):
        median_rows([first, second[1:], third])
    wrong = [{**row, "by_start": [1.0, 1.0, 1.0]} for row in first]
    with pytest.raises(RecordError, match="is not the median of"):
        write_result(wrong, META, tmp_path / "r.parquet")


def test_a_kernel_that_fails_in_one_start_is_not_hidden_by_the_others() -> None:
    first, second, third = starts((1.02, 1.0, 0.95))
    second[1] |= {"status": "wrong", "fallback": True, "config": "", "speedup": None, "published": 1.0}
    with pytest.raises(UsageError, match=r"64_64_128_TN_fp16_fp32 failed in bench 2 \(wrong\)"):
        median_rows([first, second, third])
