"""Benches of `outblas build-library` on a fake GPU, the kernels that trials choose, and searches that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas.core.journal import Journal
from outblas.records.provenance import start_of_machine
from outblas.records.results import read_result, write_result
from outblas.tune.tune import Interrupted
from outblas_lab.build import build_searches
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.finalist_trials import STARTS
from outblas_lab.build.judging import judge_path
from outblas_lab.build.library_tables import is_bench_of
from outblas_lab.build.workloads import COLD
from outblas_lab.pool import run_bench
from outblas_lab.pool.run_bench import BenchRequest
from outblas_lab.publish.summary import summarise
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
from support.helpers import without_kernels


@pytest.mark.parametrize("step", ["trial", "choose", "judge", "merge", "bench", "judge_cold", "merge_cold"])
def test_a_table_that_is_not_tuned_is_not_benched(script: Any, work: Any, step: str) -> None:
    run(script, work, "tune")
    with pytest.raises(UsageError, match="grid1000:NN:fp16:fp32 is not fully tuned"):
        run(script, work, step, tables="grid1000:NN:fp16:fp32")


def test_server_mode_takes_a_sample(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchRequest] = []
    monkeypatch.setattr(script.benching, "run_bench", lambda request, progress: seen.append(request))
    monkeypatch.setattr(script.benching, "SERVER_SAMPLE", 3)
    run(script, work, "tune", "bench", modes="server")
    (call,) = seen
    assert len(call.problems) == 3 and set(call.problems) < set(script.TABLES[0].problems())
    assert call.target_qps == 2000.0 and call.mode == "server"


def test_a_bench_of_which_half_was_made_before_the_library_changed_begins_anew(
    script: Any, work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "record", "tune")
    table = script.TABLES[0]
    journal = Path(f"{work.result(table, 'offline')}.jsonl")
    run(script, work, "bench")
    whole = read_result(work.result(table, "offline")).rows
    work.result(table, "offline").unlink()
    Journal(journal, {"library": "another"}, resume=False).close(done=False)
    run(script, work, "bench")
    assert "starting over" in capsys.readouterr().out and not journal.exists()
    assert [r["config"] for r in read_result(work.result(table, "offline")).rows] == [r["config"] for r in whole]


def test_the_steps_choose_and_judge_in_starts_of_their_own(script: Any, work: Any) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "trial", "choose", "judge", "merge")
    library, merged = work.load(), read_result(work.result(table, "offline"))
    assert is_bench_of(merged.path, library, table.problems())
    about = library.provenance["tables"][str(table)]["chosen_from"]
    assert list(about) == list(STARTS)
    judged = [read_result(judge_path(work, table, start)).rows for start in STARTS]
    for row, *each in zip(merged.rows, *judged, strict=True):
        assert row["by_start"] == [one["published"] for one in each]
        assert row["published"] == sorted(row["by_start"])[1] and not row["fallback"]
    assert [start["machine"] for start in merged.provenance["starts"]] == [start_of_machine()] * 3
    assert {each["machine"] for each in about.values()} == {start_of_machine()}
    assert {(row["starts"], row["interval"]) for row in summarise(merged.path)} == {(1, None)}, "all in one start"
    spent = [read_result(judge_path(work, table, start)).provenance["gpu_seconds"] for start in STARTS]
    assert merged.provenance["gpu_seconds"] == round(sum(spent), 1)


def test_three_starts_have_an_interval_and_all_their_commits(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "trial", "choose")
    for start in STARTS:
        monkeypatch.setattr(run_bench, "start_of_machine", lambda start=start: f"boot {start}")
        monkeypatch.setattr(run_bench, "source_commit", lambda start=start: start * 40)
        script.runs.run_job(work, ["judge", str(table), start])
    run(script, work, "merge")
    row, *_ = summarise(work.result(table, "offline"))
    assert row["starts"] == 3 and row["interval"][0] <= row["interval"][1]
    assert row["commit"] == "; ".join(start * 40 for start in STARTS)


def test_cold_caches_are_judged_in_three_starts_too(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "trial", "choose")
    with pytest.raises(UsageError, match="--steps judge_cold --starts 1"):
        run(script, work, "merge_cold")
    for start in STARTS:
        monkeypatch.setattr(run_bench, "start_of_machine", lambda start=start: f"boot {start}")
        script.runs.run_job(work, ["judge_cold", str(table), start])
        assert judge_path(work, table, start, COLD).name == f"{table.stem}_judge_cold_{start}.parquet"
    run(script, work, "merge_cold")
    merged = read_result(work.result(table, COLD))
    assert {row["mode"] for row in merged.rows} == {COLD} and all(len(row["by_start"]) == 3 for row in merged.rows)
    assert not work.result(table, "offline").exists()
    row, *_ = summarise(merged.path)
    assert (row["mode"], row["starts"]) == (COLD, 3)
    run(script, work, "bench", modes=COLD)
    assert read_result(work.result(table, COLD)).rows == merged.rows, "a bench of one start does not replace it"


def test_judging_benches_of_different_toolchains_are_not_merged(script: Any, work: Any) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "trial", "choose", "judge")
    last = read_result(judge_path(work, table, STARTS[-1]))
    other = {**last.provenance, "toolchain": {"cublas": "another"}}
    write_result(last.rows, {**last.meta, "provenance": other}, last.path)
    with pytest.raises(UsageError, match=r"judge_3.parquet and .*judge_1.parquet used different toolchains"):
        run(script, work, "merge")


def test_choose_and_merge_need_no_gpu_but_the_same_kernels(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, "tune", "trial", "choose", "judge", "merge")

    def absent(index: int) -> None:
        raise DeviceError(f"no CUDA device {index}", "an NVIDIA GPU", "run outblas doctor")

    monkeypatch.setattr(script.directory, "gpu_of_device", absent)
    before = work.load().rows
    run(script, work, "choose", "merge")
    assert work.load().rows == before
    with pytest.raises(DeviceError):
        run(script, work, "judge")
    monkeypatch.setattr(script.directory, "kernels_sha", lambda: "f" * 64)
    with pytest.raises(UsageError, match="has kernel hash "):
        run(script, work, "choose")


def test_what_loses_in_a_judging_bench_stays_and_is_published(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "trial", "choose")
    chosen = work.load()
    monkeypatch.setattr("support.fake_gpu.time_us", lambda problem, config: 4.1)  # behind the baseline from now on
    run(script, work, "judge", "merge")
    assert work.load() == chosen
    assert all(row["published"] < 1 and not row["fallback"] for row in read_result(work.result(table, "offline")).rows)


def test_a_missing_start_is_named_with_the_command(script: Any, work: Any) -> None:
    run(script, work, "tune")
    with pytest.raises(UsageError, match="--steps trial --starts 1"):
        run(script, work, "choose")
    with pytest.raises(UsageError, match="--steps judge --starts 1"):
        run(script, work, "merge")


def test_benches_of_an_earlier_library_are_not_merged(script: Any, work: Any) -> None:
    run(script, work, "tune", "trial", "choose", "judge")
    library = work.load()
    first = library.rows[0].problem
    without_kernels(library, [(first, "plain"), (first, "pdl"), (first, "weights")]).save(work.library)
    with pytest.raises(UsageError, match="was measured with another library"):
        run(script, work, "merge")


def test_a_second_search_that_was_interrupted_goes_on_and_ends_the_same(
    script: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is saved at the end only: the store has what was measured, and the next call the better kernels."""
    monkeypatch.setattr(script.search, "PROBLEMS_AT_ONCE", 2)
    monkeypatch.setattr(build_searches, "WEAK_BELOW", 100.0)  # every row
    other, table = BuildFolder(tmp_path / "other"), script.TABLES[0]
    other.path.mkdir()
    for place in (work, other):
        run(script, place, "tune")
    assert (before := other.load()).rows == work.load().rows
    script.fake.asked.clear()
    run(script, work, "again")
    assert work.load().rows != before.rows, "some have a better kernel"
    whole, script.fake.asked = script.fake.asked, []
    script.fake.interrupt[table.problems()[3]] = KeyboardInterrupt()
    with pytest.raises(Interrupted) as caught:
        run(script, other, "again")
    wanted = sum(len(configs) for _, _, configs in whole[2:])
    assert f"with 0 of {wanted} measurements of 2 problems" in str(caught.value), "of the second group"
    assert other.load() == before
    script.fake.asked.clear()
    script.fake.interrupt.clear()
    run(script, other, "again")
    assert other.load().rows == work.load().rows
    assert other.load().provenance["tables"][str(table)]["searched_again"] == len(table.problems())
    assert script.fake.asked == whole[2:], "what is in the store is not measured again"
