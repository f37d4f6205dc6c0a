"""scripts/regenerate.py from end to end on a fake GPU: what it leaves is what the readers accept."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fake_gpu
from fake_gpu import FakeGpu, install
from outblas import bench, record
from outblas.agents import Agent
from outblas.averages import launch_of_row
from outblas.config import Sm90WgmmaConfig, config_name, launch_of
from outblas.errors import RecordError, UsageError
from outblas.evaluation import Status
from outblas.journal import Journal
from outblas.library import Library
from outblas.problem import Problem
from outblas.recording import Recording
from outblas.report.retuned import notes_of_retune
from outblas.results import read_result, write_result
from outblas.roofline import H200
from outblas.second_search import near_the_best, worth_trying
from outblas.source import kernels_sha
from outblas.space import candidates

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
SHAPES = [(64 * m, 128, 512) for m in (1, 2, 4, 8)]
#: Of suite llm: one shape is of the other suite too.
LLM_SHAPES = [SHAPES[0], (16, 256, 512)]


def problems_of(name: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32") -> list[Problem]:
    shapes = {"grid1000": SHAPES, "llm": LLM_SHAPES}[name]
    return [Problem(*shape, layout, dtype, acc) for shape in shapes]  # type: ignore[arg-type]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("regenerate", "regenerate_search", "regenerate_work"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # a module of each test's own
    module: Any = importlib.import_module("regenerate")
    module.search, module.directory = sys.modules["regenerate_search"], sys.modules["regenerate_work"]
    for target in (bench, record):
        install(monkeypatch, target)
    module.fake = install(monkeypatch, module.search)
    for target in (module, module.directory):
        monkeypatch.setattr(target, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr("outblas.suites.suite", problems_of)
    monkeypatch.setattr(module.search, "packaged_kernels", lambda work, gpu: {})
    return module


@pytest.fixture
def work(script: Any, tmp_path: Path) -> Any:
    return script.Work(tmp_path)


def run(script: Any, work: Any, *steps: str, tables: str = "grid1000:TN:fp16:fp32", modes: str = "offline") -> None:
    parsed = [script.Table.parse(text) for text in tables.split(",")]
    for job in script.jobs(steps, parsed, modes.split(","), [script.TABLES[0]]):
        script.run_job(work, job)


MADE = ("record", "tune", "confirm", "bench")
ALL = "grid1000:TN:fp16:fp32,grid1000:NN:fp16:fp32,grid1000:TN:fp16:fp16,llm:TN:fp16:fp32"


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
    tables = [script.Table.parse(text) for text in ALL.split(",")]
    wanted = list(dict.fromkeys(p for table in tables for p in table.problems()))
    assert [row.problem for row in library.rows] == wanted and len(wanted) == 3 * 4 + 1
    agents = {name: about["agent"] for name, about in library.provenance["tables"].items()}
    assert agents == {str(t): "recorded" if t == script.TABLES[0] else "transfer" for t in tables}
    for table in tables:  # the shared problem is benched in both tables
        result = read_result(work.result(table, "offline"))
        assert {Problem.from_json(row) for row in result.rows} == set(table.problems())
    assert len(Recording.load(work.recording).problems) == len(SHAPES), "one table is recorded"


def test_several_tables_are_recorded_in_one_folder(script: Any, work: Any) -> None:
    tables = [script.Table.parse(text) for text in ALL.split(",")]
    recorded = [tables[0], tables[1], tables[3]]
    listed = script.jobs(["record", "tune"], tables, [], [], recorded)
    assert [job[1] for job in listed if job[0] == "record"] == [str(t) for t in recorded]
    for job in listed:
        script.run_job(work, job)
    wanted = list(dict.fromkeys(p for t in recorded for p in t.problems()))
    assert set(Recording.load(work.recording).problems) == set(wanted)
    agents = {name: about["agent"] for name, about in work.load().provenance["tables"].items()}
    assert agents == {str(t): "recorded" if t in recorded else "transfer" for t in tables}


def test_the_other_tables_begin_with_what_the_recording_found_best(script: Any, work: Any) -> None:
    run(script, work, "record", "tune", tables=ALL)
    recording, fake = Recording.load(work.recording), script.fake
    nn = Problem(*SHAPES[0], "NN")
    (asked,) = [configs for _, problem, configs in fake.asked if problem == nn]
    assert len(asked) == script.search.TRANSFER_BUDGET, "asked for at once"
    best = recording.best(Problem(*SHAPES[0]), pdl=False)
    assert best is not None and best[0] in asked


def test_what_is_done_is_not_done_again(script: Any, work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, work, *MADE, tables=ALL)
    before = {path: path.read_bytes() for path in work.path.iterdir() if path.suffix in (".json", ".parquet")}
    script.fake.asked.clear()
    capsys.readouterr()
    run(script, work, *MADE, tables=ALL)
    said = capsys.readouterr().out
    assert script.fake.asked == [] and said.count("done before") == 1 + 3 * 4
    assert before == {path: path.read_bytes() for path in work.path.iterdir() if path.suffix in (".json", ".parquet")}


def test_a_tune_that_was_stopped_goes_on_and_ends_the_same(
    script: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.search, "PROBLEMS_AT_ONCE", 1)
    tables = "grid1000:NN:fp16:fp32"
    run(script, work, "tune", tables=tables)
    other = script.Work(tmp_path / "other")
    other.path.mkdir()
    stopped: FakeGpu = script.fake
    third = Problem(*SHAPES[2], "NN")
    stopped.interrupt[third] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(script, other, "tune", tables=tables)
    assert len(Library.load(other.library).rows) == 2
    stopped.interrupt.clear()
    stopped.asked.clear()
    run(script, other, "tune", tables=tables)
    assert [problem for _, problem, _ in stopped.asked] == [third, Problem(*SHAPES[3], "NN")]
    assert Library.load(other.library).rows == Library.load(work.library).rows


def test_the_next_problems_are_listed_while_the_gpu_works_and_seconds_are_told(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.search, "PROBLEMS_AT_ONCE", 3)
    run(script, work, "tune", "borrow")
    (last,) = script.TABLES[0].problems()[3:]
    assert script.fake.listed_ahead == [(last,), ()] * 2
    assert capsys.readouterr().out.count("gpu: prove 8 s, time 5 s; host: waiting 13 s") == 2, "no idle 0.2 s"


def test_tables_tuned_elsewhere_are_benched_here(script: Any, work: Any, tmp_path: Path) -> None:
    one, other, out = (script.Work(tmp_path / name) for name in ("one", "other", "out"))
    llm = "llm:TN:fp16:fp32"
    for place, tables in ((one, str(script.TABLES[0])), (other, llm)):
        place.path.mkdir()
        run(script, place, "tune", tables=tables)
        script.publish_seconds(place, {})
    libraries = [Library.load(place.library) for place in (one, other)]
    out.path.mkdir()
    script.begin_with(out, [one.library, other.library])
    made = out.load()
    assert {row.problem: row for row in made.rows} == {r.problem: r for lib in libraries[::-1] for r in lib.rows}
    assert made.provenance["tables"].keys() == {str(script.TABLES[0]), llm}
    run(script, out, "bench", tables=llm)
    result = read_result(out.result(script.Table.parse(llm), "offline"))
    assert {Problem.from_json(row) for row in result.rows} == set(problems_of("llm"))
    before = out.library.read_bytes()
    script.begin_with(out, [one.library, other.library])
    assert out.library.read_bytes() == before, "the same command goes on"
    with pytest.raises(UsageError, match="a new directory"):
        script.begin_with(one, [one.library, other.library])
    replace(libraries[1], provenance={**libraries[1].provenance, "kernels": "others"}).save(other.library)
    with pytest.raises(UsageError, match="the same kernels"):
        script.begin_with(script.Work(tmp_path / "new"), [one.library, other.library])
    assert not (tmp_path / "new").exists()


def test_rows_that_fall_back_take_what_another_search_found(script: Any, work: Any, tmp_path: Path) -> None:
    table, other = script.TABLES[0], script.Work(tmp_path / "other")
    other.path.mkdir()
    for place in (work, other):
        run(script, place, "tune")
        script.publish_seconds(place, {})
    lost, won = (other.load().rows[i] for i in (0, 1))
    own = replace(won.plain, low=0.1)
    rows = (replace(lost, plain=None, weights=None), replace(won, plain=own), *work.load().rows[2:])
    replace(work.load(), rows=rows).save(work.library)
    files = [other.library]
    script.fill_from(work, files, [table])
    filled = work.load()
    assert filled.rows[0].plain == lost.plain and lost.plain is not None
    assert filled.rows[1].plain == own, "what a row has stays, be it the worse"
    assert [each["rows"] for each in filled.provenance["tables"][str(table)]["filled"]] == [1]
    script.fill_from(work, files, [table])
    assert work.load() == filled, "once"
    replace(other.load(), provenance={**other.load().provenance, "kernels": "others"}).save(other.library)
    with pytest.raises(UsageError, match="the same kernels"):
        script.fill_from(work, files, [table])
    with pytest.raises(UsageError, match="is not tuned"):
        script.fill_from(script.Work(tmp_path / "none"), [work.library], [table])


def test_kernels_proved_in_full_are_not_proved_so_again(script: Any, work: Any) -> None:
    run(script, work, "record", "tune", tables=ALL)
    recorded, other = script.proved(work, script.TABLES[0]), script.proved(work, script.TABLES[1])
    assert recorded and not other, "the fake's proof does not pass the last gate; the recording's does"
    assert all(o.level == "full" for o in script.fake.options)
    assert {o.proved for o in script.fake.options} == {recorded, frozenset()}


def test_kernels_of_a_library_of_these_sources_are_proved_already(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="grid1000:NN:fp16:fp32")
    table, other = script.TABLES[1], script.TABLES[0]
    assert not script.proved(work, table), "it does not say yet of which kernels it is"
    script.publish_seconds(work, {})
    built = {"toolchain": script.directory.toolchain()}  # the fake's measurements name no compiler
    library = replace(work.load(), provenance={**work.load().provenance, **built})
    library.save(work.library)
    assert script.proved(work, table) == {config_name(c) for cs in library.installed().values() for c in cs}
    assert script.proved(work, table) and not script.proved(work, other)
    replace(library, provenance={**library.provenance, "kernels": "of others"}).save(work.library)
    script.publish_seconds(work, {})
    assert not script.proved(work, table), "some of its rows may be of others still"
    for changed in ({"kernels": "of others"}, {"toolchain": {**built["toolchain"], "nvrtc": "older"}}):
        replace(library, provenance={**library.provenance, **changed}).save(work.library)
        assert not script.proved(work, table)


@pytest.mark.parametrize("step", ["confirm", "bench"])
def test_a_table_that_is_not_tuned_is_not_benched(script: Any, work: Any, step: str) -> None:
    run(script, work, "tune")
    with pytest.raises(UsageError, match="grid1000:NN:fp16:fp32 is not tuned"):
        run(script, work, step, tables="grid1000:NN:fp16:fp32")


def test_modes_beside_offline_are_of_the_extra_tables(script: Any) -> None:
    tables = [script.Table.parse(text) for text in ALL.split(",")]
    found = script.jobs(["record", "bench"], tables, ["offline", "offline_cold", "server"], tables[:1])
    first = str(tables[0])
    offline = [["bench", str(table), "offline"] for table in tables]
    assert found == [["record", first], *offline, ["bench", first, "offline_cold"], ["bench", first, "server"]]


def test_server_mode_takes_a_sample(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        script, "run_bench", lambda problems, *a, **named: seen.append({"p": problems, "a": a, **named})
    )
    monkeypatch.setattr(script, "SERVER_SAMPLE", 3)
    run(script, work, "tune", "bench", modes="server")
    (call,) = seen
    assert len(call["p"]) == 3 and set(call["p"]) < set(script.TABLES[0].problems())
    assert call["target_qps"] == 200.0 and "server" in call["a"]


def test_a_kernel_that_does_not_win_again_is_not_kept(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, work, "record", "tune")
    monkeypatch.setattr(script, "CONFIRM_BELOW", 1e9)  # everything is doubtful
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 4.1)  # behind the baseline from now on
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
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 4.1)
    run(script, work, "bench", "demote", "bench")
    assert all(row["fallback"] for row in read_result(result).rows)
    assert result.with_name(f"{result.stem}_1.parquet").exists()  # the losing bench is kept


def test_a_work_directory_of_other_kernels_is_refused(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, work, "tune")
    monkeypatch.setattr(script.directory, "kernels_sha", lambda: "other")
    with pytest.raises(UsageError, match="choose another --work"):
        run(script, work, "tune")


def test_each_job_has_a_process_and_the_seconds_are_published(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "monotonic", iter(range(0, 2000, 60)).__next__)
    monkeypatch.setattr(script, "printer", lambda what: lambda *_: None)
    commands: list[list[str]] = []

    def here(command: list[str], check: bool) -> None:
        commands.append(command)
        script.run_job(work, command[command.index("--here") + 1 :])

    monkeypatch.setattr(script.subprocess, "run", here)
    tables = "grid1000:TN:fp16:fp32,grid1000:NN:fp16:fp32"
    script.main(["--work", str(work.path), "--tables", tables, "--modes", "offline"])
    twice = [step for step in ("tune", "borrow", "refine", "confirm", "bench") for _ in range(2)]
    assert [c[c.index("--here") + 1] for c in commands] == ["record", *twice]
    provenance = Library.load(work.library).provenance
    assert provenance["seconds"]["tune grid1000:NN:fp16:fp32"] == 60.0 and len(provenance["seconds"]) == 11
    assert provenance["seconds_of_making"] == 540.0 and provenance["kernels"] == kernels_sha()
    assert "the library took 9.0 GPU minutes, all 11.0" in capsys.readouterr().out
    assert json.loads((work.path / "seconds.json").read_text()) == provenance["seconds"]


def test_the_time_of_a_job_that_failed_counts(script: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(script.subprocess, "run", fails)
    monkeypatch.setattr(script, "monotonic", iter(range(0, 2000, 60)).__next__)
    for _ in range(2):
        with pytest.raises(SystemExit, match="record grid1000:TN:fp16:fp32 failed with status 1; the same command"):
            script.main(["--work", str(work.path), "--steps", "record"])
    assert json.loads((work.path / "seconds.json").read_text()) == {"record grid1000:TN:fp16:fp32": 120.0}


@pytest.mark.parametrize(
    "arguments",
    [["--tables", "grid1000:TN"], ["--tables", "grid1000:TN:bf16:fp16"], ["--steps", "guess"], ["--modes", "hot"]],
)
def test_bad_arguments_are_one_line(
    script: Any, work: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["--work", str(work.path), *arguments])
    assert "error:" in capsys.readouterr().err


def test_agents_of_the_script_keep_the_contract_of_names(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="llm:TN:bf16:fp32")
    agent, budget = script.search.searcher(
        work, script.Table.parse("llm:TN:bf16:fp32"), work.load(), script.gpu_of_device(0)
    )
    assert isinstance(agent, Agent) and (agent.name, budget) == ("transfer", script.search.LLM_BUDGET)


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


def test_weak_rows_are_searched_again_among_what_was_not_tried(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, *MADE)
    table = script.TABLES[0]
    before = Library.load(work.library)
    weak, *others = [row.problem for row in before.rows]
    before.without([(weak, "plain"), (weak, "pdl"), (weak, "weights")]).save(work.library)
    monkeypatch.setattr(script.search, "AGAIN_BELOW", 0.5)  # only what falls back
    run(script, work, "again")
    after = Library.load(work.library)
    assert [after.lookup(p) for p in others] == [before.lookup(p) for p in others]
    with script.search.Store(work.store(table)) as store:
        first = {e.config for e in store.evaluations("tune") if e.problem == weak}
        second = [e for e in store.evaluations("again")]
    assert second and {e.problem for e in second} == {weak}
    assert not first & {e.config for e in second}, "nothing is tried twice"
    found = after.lookup(weak)
    assert found is not None and found.plain is not None
    assert found.plain.config in {e.config for e in second}
    assert "confirmed" not in after.provenance["tables"][str(table)], "it is to be confirmed anew"


def test_winners_nearby_are_tried_once_and_the_better_kernel_stays(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, *MADE)
    table, gpu = script.TABLES[0], script.gpu_of_device(0)
    problem = table.problems()[0]
    tried = script.search.searched(work, table, "borrow")
    known = {e.config for e in tried[problem]}
    unknown = next(c for c in candidates(problem, gpu) if c not in known and not c.pdl)
    monkeypatch.setattr(script.search, "borrowed", lambda p, won, known, gpu: [unknown] if p == problem else [])
    usual = fake_gpu.time_us
    monkeypatch.setattr(fake_gpu, "time_us", lambda p, c: 0.5 if (p, c) == (problem, unknown) else usual(p, c))
    run(script, work, "borrow")
    row = Library.load(work.library).lookup(problem)
    assert row is not None and row.plain is not None and row.plain.config == unknown
    provenance = Library.load(work.library).provenance["tables"][str(table)]
    assert provenance["borrowed"] == len(tried) and "confirmed" not in provenance
    with script.search.Store(work.store(table)) as store:
        assert [(e.problem, e.config) for e in store.evaluations("borrow")] == [(problem, unknown)]
    run(script, work, "borrow")
    assert f"borrow {table}: done before" in capsys.readouterr().out


def test_a_packaged_kernel_is_timed_beside_what_the_search_proposes(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, table, gpu = Problem(*SHAPES[0]), script.TABLES[0], script.gpu_of_device(0)
    offered = worth_trying(problem, gpu)
    unknown = replace(next(c for c in offered if isinstance(c, Sm90WgmmaConfig)), group=16)
    assert unknown not in offered
    monkeypatch.setattr(script.search, "packaged_kernels", lambda work, gpu: {problem: [unknown]})
    run(script, work, "tune")
    asked = {p: configs for _, p, configs in script.fake.asked}
    assert unknown in asked[problem] and len(asked[problem]) == script.search.UNRECORDED_BUDGET + 1
    assert work.load().provenance["tables"][str(table)]["agent"] == "transfer"


def test_from_nothing_begins_without_the_packaged_library(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    gpu = H200
    assert Problem(64, 64, 64) in script.search.packaged_kernels(work, gpu)
    assert script.search.packaged_kernels(replace(work, from_nothing=True), gpu) == {}
    commands: list[list[str]] = []
    monkeypatch.setattr(script.subprocess, "run", lambda command, check: commands.append(command))
    for more in ([], ["--from-nothing"]):
        script.main(["--work", str(work.path), "--steps", "borrow", "--tables", str(script.TABLES[0]), *more])
    assert ["--from-nothing" in command for command in commands] == [False, True]


def test_what_a_library_from_nothing_took_is_told_with_the_results(script: Any, work: Any) -> None:
    run(script, work, "tune")
    seconds = {"tune grid1000:TN:fp16:fp32": 90.0, "borrow grid1000:TN:fp16:fp32": 60.0, "bench x": 600.0}
    script.publish_seconds(work, seconds)
    assert notes_of_retune(work.path) == [], "nothing says that it began with nothing"
    script.publish_seconds(replace(work, from_nothing=True), seconds)
    (line,) = notes_of_retune(work.path)
    assert line.startswith("- grid1000 TN fp16/fp32, tuned from nothing: 2.5 minutes of one ")
    assert line.endswith(" (tune 1.5, borrow 1.0)")
    kept = json.loads((work.path / "retune.json").read_text())
    assert kept["by_own_timing"]["plain"]["problems"] == len(work.load().rows)
    for damage in ({"format": "other"}, {"seconds": []}, {"tables": ["grid1000"]}):
        (work.path / "retune.json").write_text(json.dumps({**kept, **damage}))
        with pytest.raises(RecordError, match="retune"):
            notes_of_retune(work.path)


def test_neighbours_of_the_best_are_tried_once_and_the_better_kernel_stays(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "tune")
    before = Library.load(work.library)
    table, gpu = script.TABLES[0], script.gpu_of_device(0)
    tried = script.search.searched(work, table, "refine")
    fast = {p: near_the_best(p, tried[p], gpu)[1] for p in table.problems()}
    usual = fake_gpu.time_us
    monkeypatch.setattr(fake_gpu, "time_us", lambda p, c: 0.5 if fast[p] == c else usual(p, c))
    run(script, work, "refine")
    after = Library.load(work.library)
    for row in after.rows:
        assert row.choice(launch_of(fast[row.problem])).config == fast[row.problem]
        assert row.choice("plain" if fast[row.problem].pdl else "pdl") is not None
    assert len(after.rows) == len(before.rows)
    assert after.provenance["tables"][str(table)]["refined"] == len(after.rows)
    asked = len(script.fake.asked)
    run(script, work, "refine")
    assert len(script.fake.asked) == asked and "done before" in capsys.readouterr().out


def test_a_family_that_fails_is_told(script: Any, work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    problem = script.TABLES[0].problems()[0]
    for config in candidates(problem, early=True, even=True):
        script.fake.statuses[problem, config] = Status.WRONG
    run(script, work, "tune")
    assert f"{script.search.UNRECORDED_BUDGET} wrong" in capsys.readouterr().out


def test_a_table_that_differs_by_its_dtype_only_tries_less(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="grid1000:TN:fp16:fp32,grid1000:TN:bf16:fp32")
    budgets = {p.dtype: len(configs) for _, p, configs in script.fake.asked}
    assert budgets == {"fp16": script.search.UNRECORDED_BUDGET, "bf16": script.search.TWIN_BUDGET}


def test_the_first_table_is_tuned_by_what_ships_until_it_is_recorded(script: Any, work: Any) -> None:
    """Other kernels than the packaged recording's: their own tuning tries more, and a recording of them less."""
    table, gpu = script.TABLES[0], script.gpu_of_device(0)
    agent, budget = script.search.searcher(work, table, work.load(), gpu)
    assert (agent.name, budget) == ("transfer", script.search.UNRECORDED_BUDGET)
    run(script, work, "tune")
    assert {len(configs) for _, _, configs in script.fake.asked} == {script.search.UNRECORDED_BUDGET}
    assert [row.problem for row in work.load().rows] == table.problems()
    run(script, work, "record")
    agent, budget = script.search.searcher(work, table, work.load(), gpu)
    assert (agent.name, budget) == ("recorded", script.search.RECORDED_BUDGET)


def test_settling_keeps_what_was_measured_and_counts_it_as_a_fall_back(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, "tune", "confirm")
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 4.1)  # everything loses from now on
    run(script, work, "bench")
    table = script.TABLES[0]
    before = read_result(work.result(table, "offline")).rows
    assert all(not row["fallback"] and row["speedup"] < 1 for row in before)
    run(script, work, "settle")
    after = read_result(work.result(table, "offline")).rows
    for old, new in zip(before, after, strict=True):
        assert new == {**old, "fallback": True, "published": 1.0}
    library = Library.load(work.library)
    assert library.fallbacks("plain") == library.fallbacks("pdl") == len(library.rows)


def test_what_is_settled_is_not_benched_again_until_its_kernels_change(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "tune", "confirm")
    before = work.load()
    slow = {row.problem for row in before.rows[:2]}
    real = fake_gpu.time_us
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 4.1 if problem in slow else real(problem, config))
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
        monkeypatch.setattr("outblas.tables.read_result", lambda path, changed=changed: SimpleNamespace(rows=[changed]))
        assert (script.behind(path) == []) is kept
    monkeypatch.setattr("outblas.tables.read_result", lambda path: SimpleNamespace(rows=[{**level, "published": 0.98}]))
    assert script.behind(path) == [(Problem.from_json(row), launch_of_row(row))]
