"""Algorithms of cuBLASLt that earlier benches in rounds and in blocks name for large problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import read_result, write_result
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.large_fallbacks import choose_fallbacks, with_algorithm
from outblas_lab.build.library_tables import rows_of_table

PUBLISHED = Path(__file__).parents[2] / "results" / "h200"
TABLE = Table.parse("grid1000:TN:fp16:fp32")
LARGE, SMALL = Problem(16384, 16384, 16384), Problem(64, 64, 64)
OPEN = LibraryRow(LARGE, "torch", "torch 2.11", "cuda:0")


def bench(torch: float | None, auto: float | None, detail: str = "index=1/8 id=66") -> dict[str, Any]:
    return {"torch_us": torch, "lt_auto_us": auto, "lt_auto_detail": detail}


@pytest.mark.parametrize(
    ("rounds", "blocks", "named"),
    [
        (bench(1.03, 1.0), bench(0.98, 1.0), True),
        (bench(0.99, 1.0), bench(1.02, 1.0, "another"), True),
        (bench(1.03, 1.0), bench(0.97, 1.0), False),
        (bench(1.004, 1.0), bench(1.0, 1.0), False),
        (bench(1.03, 1.0), bench(1.0, None), False),
        (bench(None, 1.0), bench(1.0, 1.0), False),
        (bench(1.03, 1.0), {}, False),
    ],
)
def test_both_benches_count_alike(rounds: Any, blocks: Any, named: bool) -> None:
    row = with_algorithm(OPEN, [rounds, blocks])
    assert (row.fallback, row.baseline) == (("id=66", "lt_auto") if named else ("", "torch"))
    assert named or row is OPEN


def test_other_rows_stay() -> None:
    kernel = LibraryChoice(Sm90WgmmaConfig(128, 128), 1.1, 1.05, 1.2)
    others = (
        replace(OPEN, problem=SMALL),
        replace(OPEN, plain=kernel, pdl=kernel),
        replace(OPEN, baseline="lt_auto", baseline_detail="an algorithm"),
        replace(OPEN, baseline="cublas", lt_auto_detail="an algorithm"),
    )
    for row in others:
        assert with_algorithm(row, [bench(1.1, 1.0)] * 2) is row
    level = replace(OPEN, baseline="lt_auto", baseline_detail="")  # the fastest was level with torch, which runs
    assert with_algorithm(level, [bench(1.1, 1.0)] * 2).fallback == "id=66"


def test_an_algorithm_gives_way_to_a_faster_one_of_both_benches() -> None:
    named = replace(OPEN, baseline="lt_auto", baseline_detail="index=0/8 id=9")
    faster = bench(9.9, 1.0) | {"ours_us": 1.02}
    assert with_algorithm(named, [faster, bench(9.9, 1.0, "another") | {"ours_us": 0.99}]).fallback == "id=66"
    assert with_algorithm(named, [faster, bench(9.9, 1.0) | {"ours_us": 0.98}]) is named
    level = bench(9.9, 1.0, "index=3/8 id=9") | {"ours_us": 1.02}
    assert with_algorithm(named, [bench(9.9, 1.0) | {"ours_us": 1.004}, level]) is named, "blocks timed it twice"
    itself = replace(named, baseline_detail="index=2/8 id=66")
    assert with_algorithm(itself, [faster] * 2) is itself, "two times of one algorithm"


def test_the_step_reads_the_benches_of_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = BuildFolder(tmp_path)
    rows = tuple(LibraryRow(problem, "torch", "torch 2.11", "cuda:0") for problem in TABLE.problems())
    about = read_result(PUBLISHED / f"{TABLE.stem}_block.parquet").provenance
    Library("h200", rows, {"tables": {str(TABLE): about}}).save(work.library)
    with pytest.raises(UsageError, match="_offline.parquet is missing"):
        choose_fallbacks(work, TABLE)
    for mode in ("offline", "block"):
        found = read_result(PUBLISHED / f"{TABLE.stem}_{mode}.parquet")
        for row in found.rows:
            is_large = (row["m"], row["n"], row["k"]) == (LARGE.m, LARGE.n, LARGE.k)
            ratio = (1.03 if mode == "offline" else 0.99) if is_large else 1.0
            row |= {"torch_us": 100.0 * ratio, "lt_auto_us": 100.0, "lt_auto_detail": "index=1/8 id=66"}
        write_result(found.rows, found.meta, work.result(TABLE, mode))
    choose_fallbacks(work, TABLE)
    part = rows_of_table(work.load(), TABLE)
    assert [row.problem for row in part.rows if row.fallback] == [LARGE]
    assert set(part.provenance["fallbacks_from"]) == {"offline", "block"} and part.provenance["date"] == about["date"]
    assert "named in 1 rows" in capsys.readouterr().out
