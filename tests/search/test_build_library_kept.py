"""Kernels that `outblas build-library` keeps on a fake GPU: winners of confirm, bench, demote and settle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.bench.run_bench import BenchRequest
from outblas.core.errors import UsageError
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.records.averages import launch_of_row
from outblas.records.library import Library
from outblas.records.library_tables import slower_kernels
from outblas.records.results import read_result, write_result
from support import fake_gpu
from support.build_library_fixture import (  # noqa: F401
    ALL,
    LLM_SHAPES,
    MADE,
    SHAPES,
    problems_of,
    run,
    script_fixture,
    work_fixture,
)


@pytest.mark.parametrize("step", ["confirm", "bench"])
def test_a_table_that_is_not_tuned_is_not_benched(script: Any, work: Any, step: str) -> None:
    run(script, work, "tune")
    with pytest.raises(UsageError, match="grid1000:NN:fp16:fp32 is not tuned"):
        run(script, work, step, tables="grid1000:NN:fp16:fp32")


def test_server_mode_takes_a_sample(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchRequest] = []
    monkeypatch.setattr(script.steps, "run_bench", lambda request, progress: seen.append(request))
    monkeypatch.setattr(script.steps, "SERVER_SAMPLE", 3)
    run(script, work, "tune", "bench", modes="server")
    (call,) = seen
    assert len(call.problems) == 3 and set(call.problems) < set(script.TABLES[0].problems())
    assert call.target_qps == 200.0 and call.mode == "server"


def test_a_kernel_that_does_not_win_again_is_not_kept(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, work, "record", "tune")
    monkeypatch.setattr(script.steps, "CONFIRM_BELOW", 1e9)  # everything is doubtful
    monkeypatch.setattr("support.fake_gpu.time_us", lambda problem, config: 4.1)  # behind the baseline from now on
    run(script, work, "confirm")
    library = Library.load(work.library)
    assert library.fallbacks("plain") == library.fallbacks("pdl") == len(SHAPES)
    about = library.provenance["tables"][str(script.TABLES[0])]
    assert (about["confirmed"], about["not_confirmed"]) == (4, 8)


def test_a_kernel_behind_in_the_bench_is_demoted_and_the_next_bench_falls_back(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, *MADE)
    result = work.result(script.TABLES[0], "offline")
    run(script, work, "demote")
    assert result.exists(), "nothing was lost, so the bench stands"
    result.unlink()
    monkeypatch.setattr("support.fake_gpu.time_us", lambda problem, config: 4.1)
    run(script, work, "bench", "demote", "bench")
    assert all(row["fallback"] for row in read_result(result).rows)
    assert result.with_name(f"{result.stem}_1.parquet").exists()  # the losing bench is kept


def test_a_bench_of_which_half_was_made_before_the_library_changed_begins_anew(
    script: Any, work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "record", "tune", "confirm")
    table = script.TABLES[0]
    journal = Path(f"{work.result(table, 'offline')}.jsonl")
    run(script, work, "bench")
    whole = read_result(work.result(table, "offline")).rows
    work.result(table, "offline").unlink()
    Journal(journal, {"library": "another"}, resume=False).close(done=False)
    run(script, work, "bench")
    assert "begins anew" in capsys.readouterr().out and not journal.exists()
    assert [r["config"] for r in read_result(work.result(table, "offline")).rows] == [r["config"] for r in whole]


def test_settling_keeps_what_was_measured_and_counts_it_as_a_fall_back(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, "tune", "confirm")
    monkeypatch.setattr("support.fake_gpu.time_us", lambda problem, config: 4.1)  # everything loses from now on
    run(script, work, "bench")
    table = script.TABLES[0]
    before = read_result(work.result(table, "offline")).rows
    assert all(not row["fallback"] and row["speedup"] < 1 for row in before)
    run(script, work, "settle")
    after = read_result(work.result(table, "offline")).rows
    for old, new in zip(before, after, strict=True):
        assert old["ran"] == old["config"] and new == {**old, "fallback": True, "published": 1.0, "ran": None}
    library = Library.load(work.library)
    assert library.fallbacks("plain") == library.fallbacks("pdl") == len(library.rows)


def test_what_is_settled_is_not_benched_again_until_its_kernels_change(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "tune", "confirm")
    before = work.load()
    slow = {row.problem for row in before.rows[:2]}
    real = fake_gpu.time_us
    monkeypatch.setattr(
        "support.fake_gpu.time_us", lambda problem, config: 4.1 if problem in slow else real(problem, config)
    )
    run(script, work, "bench", "settle")
    settled = work.load()
    assert settled.fallbacks("plain") == 2
    capsys.readouterr()
    run(script, work, "bench", "settle")
    assert "offline: done before" in capsys.readouterr().out and work.load() == settled
    before.save(work.library)  # its kernels are back
    run(script, work, "bench")
    assert "done before" not in capsys.readouterr().out


@pytest.mark.parametrize(("auto_us", "named"), [(5.04, "index=0/9 algo"), (5.06, "")])
def test_settling_names_no_algorithm_that_is_slower_than_torch(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, auto_us: float, named: str
) -> None:
    run(script, work, "tune", "confirm", "bench")
    library = Library.load(work.library)
    row = replace(library.rows[0], baseline="torch", lt_auto_detail="index=0/9 algo")
    replace(library, rows=(row, *library.rows[1:])).save(work.library)
    path = work.result(script.TABLES[0], "offline")
    benched = [{**r, "torch_us": 5.0, "lt_auto_us": auto_us} for r in read_result(path).rows]
    write_result(benched, read_result(path).meta, path)
    run(script, work, "settle")
    assert Library.load(work.library).rows[0].lt_auto_detail == named


def test_a_kernel_that_is_level_is_kept_while_torch_is_behind(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, *MADE)
    path = work.result(script.TABLES[0], "offline")
    row = next(row for row in read_result(path).rows if not row["fallback"])
    level = {**row, "low": 0.995, "published": 0.998, "speedup": 0.998}
    for torch, kept in ((1.05, True), (0.99, False), (None, False)):
        changed = {**level, "torch_us": None if torch is None else torch * row["ours_us"]}
        monkeypatch.setattr(
            "outblas.records.library_tables.read_result", lambda path, changed=changed: SimpleNamespace(rows=[changed])
        )
        assert (slower_kernels(path) == []) is kept
    monkeypatch.setattr(
        "outblas.records.library_tables.read_result", lambda path: SimpleNamespace(rows=[{**level, "published": 0.98}])
    )
    assert slower_kernels(path) == [(Problem.from_json(row), launch_of_row(row))]
