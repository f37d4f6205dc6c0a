"""Effects of a bench on a library's table: its rows, and the algorithms and kernels that are dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.records import library_merge
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow, runs_instead_of_torch
from outblas_lab.build import library_tables
from support.helpers import synthetic_catalogue, synthetic_problems

PROBLEMS, CONFIGS = synthetic_problems(), synthetic_catalogue()
PLAIN = CONFIGS[0]
TABLE: Any = SimpleNamespace(problems=lambda: PROBLEMS[:3])
HERE = Path("bench.parquet")


def row(index: int, choice: LibraryChoice | None = None, **fields: Any) -> LibraryRow:
    return LibraryRow(PROBLEMS[index], **{"baseline": "torch", **fields}, plain=choice)


def bench_row(index: int, **fields: Any) -> dict[str, Any]:
    known = {
        "mode": "offline",
        "fallback": False,
        "status": "passed",
        "config": "",
        "pdl": False,
        "torch_us": 2.0,
        "lt_auto_us": 3.0,
    }
    return {**PROBLEMS[index].to_json(), **known, **fields}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(library_tables, "read_result", lambda path: SimpleNamespace(rows=rows))
    monkeypatch.setattr(library_tables, "launch_of_row", lambda found: "plain")
    return rows


@pytest.mark.parametrize(("theirs", "runs"), [(0.98, True), (0.995, False), (1.0, False), (1.9, False), (None, False)])
def test_an_algorithm_runs_where_it_is_over_a_percent_faster_than_torch(theirs: float | None, runs: bool) -> None:
    assert runs_instead_of_torch(theirs, 1.0) is runs
    assert runs_instead_of_torch(1.0, None) and not runs_instead_of_torch(None, None)


def test_a_table_is_taken_from_a_library_that_has_all_of_it() -> None:
    provenance = {"tables": {str(TABLE): {"gpu": "h200"}}}
    whole = Library("h200", tuple(row(i) for i in (4, 0, 1, 2)), provenance)
    part = library_tables.rows_of_table(whole, TABLE)
    assert [each.problem for each in part.rows] == [PROBLEMS[i] for i in (0, 1, 2)] and part.provenance == {
        "gpu": "h200"
    }
    for short in (replace(whole, rows=whole.rows[:3]), replace(whole, provenance={"tables": {}})):
        with pytest.raises(UsageError, match="not fully tuned"):
            library_tables.rows_of_table(short, TABLE)


CHOICE = LibraryChoice(PLAIN, 1.2, 1.1, 1.3)


def test_a_bench_is_of_its_problems_alone(bench: list[dict[str, Any]]) -> None:
    library = Library("h200", (row(0), row(1)))
    bench += [bench_row(0, fallback=True), bench_row(1, fallback=True)]
    assert library_tables.is_bench_of(HERE, library, PROBLEMS[:2])
    assert not library_tables.is_bench_of(HERE, library, PROBLEMS[:3])
    assert not library_tables.is_bench_of(HERE, library, PROBLEMS[:1])
    assert not library_tables.is_bench_of(HERE, library, [PROBLEMS[0], PROBLEMS[2]])


@pytest.mark.parametrize(
    ("installed", "fields", "same"),
    [
        (CHOICE, {"config": "the kernel"}, True),
        (CHOICE, {"config": "another"}, False),
        (None, {"config": "the kernel"}, False),
        (CHOICE, {"fallback": True, "status": Status.LEFT_OUT.value}, False),
        *((CHOICE, {"fallback": True, "status": s.value}, True) for s in Status if s.value > Status.PASSED.value),
        *(
            (CHOICE, {"fallback": True, "status": s.value}, s is not Status.LEFT_OUT)
            for s in Status
            if s.value < Status.PASSED.value
        ),
    ],
)
def test_a_bench_is_of_the_kernels_that_are_installed(
    bench: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, installed: Any, fields: Any, same: bool
) -> None:
    monkeypatch.setattr(library_tables, "config_name", lambda config: "the kernel")
    bench.append(bench_row(0, **fields))
    assert library_tables.is_bench_of(HERE, Library("h200", (row(0, installed),)), PROBLEMS[:1]) is same


@pytest.mark.parametrize(("low", "newer"), [(1.09, False), (1.1, False), (1.11, True)])
def test_of_two_kernels_the_one_with_the_higher_lower_bound_stays_and_the_older_one_of_equals(
    low: float, newer: bool
) -> None:
    other = LibraryChoice(CONFIGS[2], 1.25, low, 1.4)
    assert not CONFIGS[2].pdl and CONFIGS[2] != PLAIN
    merged = library_merge.merge_rows(row(0, CHOICE), row(0, other))
    assert merged.plain == (other if newer else CHOICE)
    assert library_merge.merge_rows(row(0), row(0, other)).plain == other
    assert library_merge.merge_rows(row(0, CHOICE), row(0)).plain == CHOICE


def test_figures_are_of_these_kernels_from_the_first_search_on() -> None:
    tables = {
        "a": {"date": "2026-02-02", "kernels": "new"},
        "b": {"date": "2026-02-01"},
        "c": {"date": "2025-01-01", "kernels": "old", "proved": {"kernels": "new", "date": "2026-03-01"}},
    }
    assert library_tables.kernels_since(Library("h200", (), {"kernels": "new", "tables": tables})) == "2026-02-01"
    assert library_tables.kernels_since(Library("h200", (), {"kernels": "other", "tables": {"a": tables["a"]}})) == ""
    assert (
        library_tables.kernels_since(Library("h200", (), {})) == ""
        and library_tables.kernels_since(Library("h200", (), {"tables": tables})) == ""
    )
