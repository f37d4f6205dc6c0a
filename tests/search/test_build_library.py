"""`outblas build-library` from end to end on a fake GPU: readers accept its files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages.notes import RETUNE
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.config import config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.process_group import Ended
from outblas.core.suites import Table
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.results import read_result
from outblas_lab.build.build_run import (
    adopt,
    copy_tables_from,
    jobs,
    publish_seconds,
    run_job,
    run_jobs,
)
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.finalists import finalists
from outblas_lab.recordings.recording import Recording
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
from support.gpus.known import H200


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["build-library", *arguments], env={"COLUMNS": "200"})


def job_of(words: list[str]) -> list[str]:
    """Return the job of a started process."""
    return words[words.index("--job") + 1].split()


def test_every_step_leaves_files_that_load(script: Any, work: Any) -> None:
    run(script, work, *MADE)
    table = script.TABLES[0]
    assert list(Recording.load(work.recording).problems) == table.problems()
    library = Library.load(work.library)
    assert [row.problem for row in library.rows] == table.problems()
    assert library.provenance["gpu"] and library.provenance["tables"][str(table)]["agent"] == "recorded"
    result = read_result(work.result(table, "offline"))
    assert len(result.rows) == 2 * len(SHAPES)
    assert not any(row["fallback"] for row in result.rows)
    assert {row["lt_auto_detail"] for row in result.rows} == {"lt_auto's algorithm"}


def test_every_table_is_in_one_library_and_each_problem_is_tuned_once(script: Any, work: Any) -> None:
    run(script, work, *MADE, tables=ALL)
    library = Library.load(work.library)
    tables = [Table.parse(text) for text in ALL.split(",")]
    wanted = list(dict.fromkeys(p for table in tables for p in table.problems()))
    assert [row.problem for row in library.rows] == wanted and len(wanted) == 3 * 4 + 1
    agents = {name: about["agent"] for name, about in library.provenance["tables"].items()}
    assert agents == {str(t): "recorded" if t == script.TABLES[0] else "transfer" for t in tables}
    for table in tables:  # the shared problem is benched in both tables
        result = read_result(work.result(table, "offline"))
        assert {Problem.from_json(row) for row in result.rows} == set(table.problems())
    assert len(Recording.load(work.recording).problems) == len(SHAPES), "one table is recorded"


def test_several_tables_are_recorded_in_one_folder(script: Any, work: Any) -> None:
    tables = [Table.parse(text) for text in ALL.split(",")]
    recorded = [tables[0], tables[1], tables[3]]
    listed = jobs(["record", "tune"], tables, [], [], recorded)
    assert [job[1] for job in listed if job[0] == "record"] == [str(t) for t in recorded]
    for job in listed:
        run_job(work, job)
    wanted = list(dict.fromkeys(p for t in recorded for p in t.problems()))
    assert set(Recording.load(work.recording).problems) == set(wanted)
    agents = {name: about["agent"] for name, about in work.load().provenance["tables"].items()}
    assert agents == {str(t): "recorded" if t in recorded else "transfer" for t in tables}


def test_what_is_done_is_not_done_again(script: Any, work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, work, *MADE, tables=ALL)
    before = {path: path.read_bytes() for path in work.path.iterdir() if path.suffix in (".json", ".parquet")}
    script.fake.asked.clear()
    capsys.readouterr()
    run(script, work, *MADE, tables=ALL)
    said = capsys.readouterr().out
    assert script.fake.asked == [] and said.count("already done") == 1 + 2 * 4
    assert before == {path: path.read_bytes() for path in work.path.iterdir() if path.suffix in (".json", ".parquet")}


def test_tables_tuned_elsewhere_are_benched_here(script: Any, work: Any, tmp_path: Path) -> None:
    one, other, out = (BuildFolder(tmp_path / name) for name in ("one", "other", "out"))
    llm = "llm:TN:fp16:fp32"
    for place, tables in ((one, str(script.TABLES[0])), (other, llm)):
        place.path.mkdir()
        run(script, place, "tune", tables=tables)
        publish_seconds(place, {})
    libraries = [Library.load(place.library) for place in (one, other)]
    out.path.mkdir()
    copy_tables_from(out, [one.library, other.library])
    made = out.load()
    assert {row.problem: row for row in made.rows} == {r.problem: r for lib in libraries[::-1] for r in lib.rows}
    assert made.provenance["tables"].keys() == {str(script.TABLES[0]), llm}
    run(script, out, "bench", tables=llm)
    result = read_result(out.result(Table.parse(llm), "offline"))
    assert {Problem.from_json(row) for row in result.rows} == set(problems_of("llm"))
    before = out.library.read_bytes()
    copy_tables_from(out, [one.library, other.library])
    assert out.library.read_bytes() == before, "the same command goes on"
    copy_tables_from(one, [other.library])
    assert set(libraries[0].rows) <= set(one.load().rows), "rows that a directory has stay"
    assert one.load().provenance["tables"].keys() == made.provenance["tables"].keys()
    replace(libraries[1], gpu="h100").save(other.library)
    with pytest.raises(UsageError, match="one GPU model"):
        copy_tables_from(BuildFolder(tmp_path / "new"), [one.library, other.library])
    assert not (tmp_path / "new").exists()


def test_modes_beside_offline_are_of_the_extra_tables(script: Any) -> None:
    tables = [Table.parse(text) for text in ALL.split(",")]
    found = jobs(["record", "bench"], tables, ["offline", "offline_cold", "server"], tables[:1])
    first = str(tables[0])
    offline = [["bench", str(table), "offline"] for table in tables]
    assert found == [["record", first], *offline, ["bench", first, "offline_cold"], ["bench", first, "server"]]


def test_a_work_directory_of_other_kernels_is_refused(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, work, "tune")
    monkeypatch.setattr("outblas.records.proved_kernels.kernels_sha", lambda: "other")
    with pytest.raises(UsageError, match="pass another --work"):
        run(script, work, "tune")


def test_each_job_has_a_process_and_the_seconds_are_published(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.runs, "monotonic", iter(range(0, 9000, 60)).__next__)
    for module in (script.search, script.benching, script.trials):
        monkeypatch.setattr(module, "printer", lambda what: lambda *_: None)
    commands: list[list[str]] = []

    def here(words: list[str], **_: bool) -> Ended:
        commands.append(words)
        run_job(work, job_of(words))
        return Ended(0, interrupted=False)

    monkeypatch.setattr(script.runs, "run_to_end", here)
    tables = "grid1000:TN:fp16:fp32,grid1000:NN:fp16:fp32"
    done = command("--work", str(work.path), "--tables", tables, "--modes", "offline")
    assert done.exit_code == 0, (done.stderr, done.exception)
    starts = {"trial": 8, "judge": 8}
    steps = ("tune", "borrow", "refine", "trial", "choose", "judge", "merge", "bench")
    twice = [step for step in steps for _ in range(starts.get(step, 2))]
    assert [job_of(words)[0] for words in commands] == ["record", *twice]
    assert {tuple(words[1:6]) for words in commands} == {("-m", "outblas", "build-library", "--work", str(work.path))}
    provenance = Library.load(work.library).provenance
    assert provenance["seconds"]["tune grid1000:NN:fp16:fp32"] == 60.0 and len(provenance["seconds"]) == 29
    assert provenance["seconds_of_making"] == 17 * 60.0 and provenance["kernels"] == kernels_sha()
    assert "the library took 17.0 of 29.0 GPU minutes" in done.stdout
    assert f"library: {work.library}" in done.stdout
    assert f"bench: {work.result(script.TABLES[0], 'offline')}" in done.stdout
    assert json.loads((work.path / "seconds.json").read_text()) == provenance["seconds"]


def test_the_time_of_a_job_that_failed_counts(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.runs, "run_to_end", lambda words, **_: Ended(1, interrupted=False))
    monkeypatch.setattr(script.runs, "monotonic", iter(range(0, 2000, 60)).__next__)
    for _ in range(2):
        done = command("--work", str(work.path), "--steps", "record")
        assert done.exit_code == 2
        assert "record grid1000:TN:fp16:fp32 failed with status 1; expected" in done.stderr
        assert "rerun the command; it resumes" in done.stderr
    assert json.loads((work.path / "seconds.json").read_text()) == {"record grid1000:TN:fp16:fp32": 120.0}


@pytest.mark.parametrize(
    "arguments",
    [["--tables", "grid1000:TN"], ["--tables", "grid1000:TN:bf16:fp16"], ["--steps", "guess"], ["--modes", "hot"]],
)
def test_bad_arguments_are_one_line(script: Any, work: Any, arguments: list[str]) -> None:
    done = command("--work", str(work.path), *arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error:")


def test_without_jobs_the_library_keeps_its_seconds(script: Any, work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, work, "tune")
    publish_seconds(work, {"tune A": 60.0})
    before = work.library.read_bytes()
    capsys.readouterr()
    run_jobs(work, [])
    assert work.library.read_bytes() == before and capsys.readouterr().out == ""


def test_from_nothing_begins_without_the_packaged_library(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    gpu = H200
    few = Library.packaged("h200").restricted_to([Problem(64, 64, 64), Problem(128, 64, 64)])
    monkeypatch.setattr(Library, "packaged", lambda *_, **__: few)  # neighbours of all its kernels take long
    assert Problem(64, 64, 64) in script.search.packaged_kernels(work, gpu)
    assert script.search.packaged_kernels(replace(work, from_nothing=True), gpu) == {}
    commands: list[list[str]] = []

    def done_well(words: list[str], **_: bool) -> Ended:
        commands.append(words)
        return Ended(0, interrupted=False)

    monkeypatch.setattr(script.runs, "run_to_end", done_well)
    for more in ([], ["--from-nothing"]):
        done = command("--work", str(work.path), "--steps", "borrow", "--tables", str(script.TABLES[0]), *more)
        assert done.exit_code == 0, done.stderr
    assert ["--from-nothing" in words for words in commands] == [False, True]


def test_what_a_library_from_nothing_took_is_told_with_the_results(script: Any, work: Any) -> None:
    run(script, work, "tune")
    seconds = {"tune grid1000:TN:fp16:fp32": 90.0, "borrow grid1000:TN:fp16:fp32": 60.0, "bench x": 600.0}
    publish_seconds(work, seconds)
    assert RETUNE.lines(work.path) == [], "nothing says that it began with nothing"
    publish_seconds(replace(work, from_nothing=True), seconds)
    (line,) = RETUNE.lines(work.path)
    assert line.startswith("- grid1000 TN fp16/fp32, tuned from scratch: 2.5 minutes of one ")
    dated = r" \(tune 1\.5, borrow 1\.0\), \d{4}-\d\d-\d\d, commit \w+$"
    assert re.search(dated, line), "an old figure says when it was measured"
    kept = json.loads((work.path / "retune.json").read_text())
    assert kept["by_own_timing"]["plain"]["problems"] == len(work.load().rows)
    for damage in ({"format": "other"}, {"seconds": []}, {"tables": ["grid1000"]}):
        (work.path / "retune.json").write_text(json.dumps({**kept, **damage}))
        with pytest.raises(RecordError, match="retune"):
            RETUNE.lines(work.path)


def test_a_gpu_begins_with_the_finalists_of_another_ones_build(
    script: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    table, other = script.TABLES[0], BuildFolder(tmp_path / "other")
    other.path.mkdir()
    run(script, other, "tune", "trial", "choose")
    theirs, first, late = other.load(), finalists(other, table), [Sm90WgmmaConfig(64, 64)]
    reopened = next(iter(first))
    write_json(other.reopened_finalists(table, "reopen"), {reopened.key: [config_name(c) for c in late]})
    with pytest.raises(UsageError, match="for the same GPU model"):
        adopt(work, other.path, [table])
    replace(theirs, gpu="h100").save(other.library)
    adopt(work, other.path, [table])
    installed = theirs.installed()
    expected = {p: list(dict.fromkeys((*configs, *installed[p]))) for p, configs in first.items()}
    expected[reopened] = list(dict.fromkeys((*late, *installed[reopened])))
    assert finalists(work, table) == expected, "of each row the last list, then what the other library installs"
    begun = work.load()
    assert not any(begun.installed().values()), "nothing was timed here, so nothing is installed"
    assert begun.provenance["tables"][str(table)]["adopted"]["gpu"] == "h100"
    run(script, work, "tune", "trial", "choose")
    assert "tune grid1000:TN:fp16:fp32: already done" in capsys.readouterr().out
    chosen = work.load()
    for problem, configs in chosen.installed().items():
        assert configs and set(configs) <= set(expected[problem])
    before = work.library.read_bytes()
    adopt(work, other.path, [table])
    assert work.library.read_bytes() == before, "the same command goes on"


def test_only_a_build_of_another_gpu_is_adopted(script: Any, work: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no library\.json"):
        adopt(work, tmp_path / "nothing", [script.TABLES[0]])
