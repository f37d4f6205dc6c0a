"""A comparison's runs on disk, and the command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.errors import DeviceError, UsageError
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas.tune.tune import Interrupted
from outblas_lab.compare import compare_run, held_out
from outblas_lab.compare.compare_result import read_comparison
from outblas_lab.compare.compare_run import CompareRequest, noise_floor, run_compare
from outblas_lab.compare.held_out import CompareUnit, Plan, held_out_tasks, run_unit, search_task
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import synthetic_recording

BUDGETS = (0, 1, 2, 4, 32)


# Runs


@pytest.fixture
def folder(tmp_path: Path) -> str:
    synthetic_recording(problems=12, candidates=40).write(tmp_path / "recording")
    return str(tmp_path / "recording")


def content(path: Path) -> list[Any]:
    import pyarrow.parquet as pq

    return list(pq.read_table(path).to_pylist())


def run(folder: str, out: Path, **changes: Any) -> list[Any]:
    settings: dict[str, Any] = {"splits": ["shapes"], "agents": ["random", "exhaustive"], "seeds": 2, "command": "test"}
    progress, say = changes.pop("progress", None), changes.pop("say", None)
    run_compare(CompareRequest(Plan(folder, BUDGETS, 0.5), out_path=out, **{**settings, **changes}), progress, say)
    return content(out)


def test_a_run_writes_what_a_search_finds_whatever_the_jobs(folder: str, tmp_path: Path) -> None:
    rows = run(folder, tmp_path / "one.parquet")
    assert rows == run(folder, tmp_path / "two.parquet", jobs=2)
    recording = Recording.load(folder)
    split, tasks = held_out_tasks(Plan(folder, BUDGETS, 0.5), recording, "shapes")
    assert len(rows) == 3 * len(tasks) * len(BUDGETS), "two seeds of random, one of exhaustive, which does not draw"
    replay = ReplayEvaluator(recording)
    for seed in (0, 1):
        mine = [r for r in rows if r["agent"] == "random" and r["seed"] == seed]
        want = [q for task in tasks for q in search_task(make_agent("random", seed, H200), task, replay, BUDGETS)[0]]
        assert [r["quality"] for r in mine] == want
    comparison = read_comparison(tmp_path / "one.parquet")
    size = {"training": len(split.training), "held_out": len(split.held_out), "searched": len(split.held_out)}
    floor = noise_floor(recording, tasks)
    assert comparison.meta["splits"] == {"shapes": {**size, "tasks": len(tasks), "noise_floor": floor}}
    assert comparison.meta["recording"]["sha256"] == recording_sha(recording)
    assert comparison.provenance["command"] == "test" and comparison.measured["gpu"] == "NVIDIA H200"
    assert comparison.meta["costs"].keys() == {"random", "exhaustive"}
    assert not (tmp_path / "one.parquet.jsonl").exists()


def test_an_interrupted_run_resumes_to_the_same_rows(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder, tmp_path / "whole.parquet")
    monkeypatch.setattr(held_out, "ENTRY_S", -1.0)  # in this process: an entry per task
    monkeypatch.setattr(compare_run, "run_units", in_process)

    def stop(done: int, total: int, note: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    out = tmp_path / "cut.parquet"
    with pytest.raises(Interrupted, match="interrupted with 5 of"):
        run(folder, out, progress=stop)
    assert not out.exists()
    with (tmp_path / "cut.parquet.jsonl").open("ab") as file:
        file.write(b'{"cut short')
    seen: list[int] = []
    assert run(folder, out, progress=lambda done, total, note: seen.append(done)) == whole
    assert seen[0] == 6 and seen[-1] == len(whole) // len(BUDGETS)
    assert not (tmp_path / "cut.parquet.jsonl").exists()


def test_agents_may_be_added_and_dropped_when_a_run_resumes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_run, "run_units", in_process)
    started: list[CompareUnit] = []
    monkeypatch.setattr(held_out, "make_agent", lambda name, seed, gpu: broken_or(name, seed, gpu, started))
    out = tmp_path / "r.parquet"
    with pytest.raises(RuntimeError, match="evolution is broken"):
        run(folder, out, agents=["exhaustive", "evolution"])
    rows = run(folder, out, agents=["random", "exhaustive"], seeds=1)
    assert rows == run(folder, tmp_path / "other.parquet", agents=["random", "exhaustive"], seeds=1)
    assert started.count("exhaustive") == 2, "once in the broken run, once in the other file's"  # type: ignore[arg-type]


@pytest.mark.parametrize("smaller", [{"agents": ["exhaustive"]}, {"seeds": 1}, {"plan": {"sample": 2}}])
def test_a_smaller_run_keeps_the_journal_of_an_interrupted_larger_one(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smaller: dict[str, Any]
) -> None:
    whole = run(folder, tmp_path / "whole.parquet")
    monkeypatch.setattr(held_out, "ENTRY_S", -1.0)  # in this process: an entry per task
    monkeypatch.setattr(compare_run, "run_units", in_process)
    out, journal = tmp_path / "r.parquet", tmp_path / "r.parquet.jsonl"
    stopped_at = len(whole) // len(BUDGETS) - 1

    def stop(done: int, total: int, note: str) -> None:
        if done == stopped_at:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(folder, out, progress=stop)
    recorded, said = journal.read_text(), list[str]()
    plan = Plan(folder, BUDGETS, 0.5, **smaller.pop("plan", {}))
    asked = {"splits": ["shapes"], "agents": ["random", "exhaustive"], "seeds": 2, "command": "test", **smaller}
    run_compare(CompareRequest(plan, out_path=out, **asked), say=said.append)
    assert journal.read_text().startswith(recorded) and f"kept {journal}" in said[-1]
    out.unlink()
    seen: list[int] = []
    assert run(folder, out, progress=lambda done, total, note: seen.append(done)) == whole
    assert seen in ([stopped_at + 1], []) and not journal.exists()


def in_process(units: Sequence[CompareUnit], plan: Plan, jobs: int, watch: Any = None) -> Any:
    for unit in units:
        yield from run_unit(unit, plan, Recording.load(plan.recording))


def test_a_run_says_what_it_prepares_and_what_it_kept(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(compare_run, "PREPARATION_S", {"random": 65})
    out, said = tmp_path / "r.parquet", list[str]()

    def stop(done: int, total: int, note: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(folder, out, agents=["random"], progress=stop, say=said.append)
    assert any("agent random, split" in line and "(about 65 s on one core" in line for line in said)
    assert any(line.startswith("still running after ") for line in said), "silence is reported"
    assert not any("resuming" in line for line in said)
    said.clear()
    run(folder, out, agents=["random"], say=said.append)
    assert any(line.startswith("resuming: ") and str(out) in line for line in said)


def broken_or(name: str, seed: int, gpu: Any, started: list[Any]) -> Agent:
    started.append(name)
    if name == "evolution":
        raise RuntimeError("evolution is broken")
    return make_agent(name, seed, gpu)


def test_a_journal_of_other_budgets_is_refused_and_kept(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    journal = tmp_path / "r.parquet.jsonl"
    journal.write_text(json.dumps({"budgets": [1]}) + "\n")
    with pytest.raises(UsageError, match="other settings"):
        run(folder, out)
    assert json.loads(journal.read_text()) == {"budgets": [1]}
    assert run(folder, out, resume=False)


def test_what_a_process_raises_is_raised_here(folder: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        list(held_out.run_units([CompareUnit("shapes", "random", 0)], Plan(str(tmp_path / "none"), BUDGETS), 1))


def test_a_process_that_died_is_named() -> None:
    ours, theirs = Pipe()
    theirs.close()
    dead: Any = SimpleNamespace(exit_code=lambda: -9)
    with pytest.raises(DeviceError, match="exit code -9 on agent random.*fewer --jobs"):
        held_out._receive(ours, dead, CompareUnit("shapes", "random", 0))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(a recording, the result of a comparison by it)."""
    place = tmp_path_factory.mktemp("finished")
    synthetic_recording(problems=12, candidates=40).write(place / "recording")
    run(str(place / "recording"), place / "r.parquet")
    return str(place / "recording"), place / "r.parquet"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agents": []}, "--agents is ''"),
        ({"agents": ["random", "random"]}, "--agents is 'random,random'"),
        ({"agents": ["oracle"]}, "unknown agent 'oracle'"),
        ({"agents": ["recorded"]}, "knows the recorded answers"),
        ({"agents": ["transfer"]}, "knows the recorded answers"),
        ({"splits": ["rows"]}, "unknown split 'rows'"),
        ({"splits": ["shapes", "shapes"]}, "--splits is 'shapes,shapes'"),
        ({"splits": []}, "--splits is ''"),
        ({"splits": ["layout"]}, "the recording has only TN"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"seeds": 10**12}, "--seeds is 1000000000000"),
        ({"jobs": 0}, "--jobs is 0"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing(
    folder: str, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(folder, tmp_path / "out" / "r.parquet", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("budgets", [(), (-1, 2), (2, 1), (1, 1), (1, 10**14)])
def test_budgets_must_ascend(folder: str, tmp_path: Path, budgets: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="budgets"):
        run_compare(CompareRequest(Plan(folder, budgets), ["shapes"], ["random"], 1, tmp_path / "r.parquet", "test"))


def test_a_folder_as_the_result_file_is_refused_before_the_search(folder: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agents": ["random"]}, r"\(agents\).*agents=\['exhaustive', 'random'\]"),
        ({"seeds": 1}, r"\(seeds\).*seeds=2"),
        ({"splits": ["families"]}, r"\(splits\).*splits=\['shapes'\]"),
        ({"plan": {"budgets": (0, 1)}}, r"\(budgets\).*budgets=\[0, 1, 2, 4, 32\]"),
        ({"plan": {"share": 0.25}}, r"\(held_out\).*held_out=0.5"),
        ({"plan": {"split_seed": 1}}, r"\(split_seed\).*split_seed=0"),
        ({"plan": {"sample": 2}}, r"\(sample\).*sample=None"),
    ],
)
def test_a_result_of_other_settings_is_not_replaced(
    finished: tuple[str, Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder, result = finished
    out = Path(shutil.copy(result, tmp_path / "r.parquet"))
    before = out.read_bytes()
    asked = {**{"budgets": BUDGETS, "share": 0.5}, **changes.get("plan", {})}
    plan, others = Plan(folder, **asked), {k: v for k, v in changes.items() if k != "plan"}
    settings = {"splits": ["shapes"], "agents": ["random", "exhaustive"], "seeds": 2, **others}
    with pytest.raises(UsageError, match=f"other settings {words}.*another --out.*--no-resume"):
        run_compare(CompareRequest(plan, out_path=out, command="test", **settings))
    assert out.read_bytes() == before and not (tmp_path / "r.parquet.jsonl").exists()
    run_compare(CompareRequest(plan, out_path=out, command="test", resume=False, **settings))
    assert out.read_bytes() != before


def test_a_result_of_another_recording_is_not_replaced(folder: str, tmp_path: Path) -> None:
    run(folder, tmp_path / "r.parquet")
    made = synthetic_recording(problems=12, candidates=40)
    replace(made, provenance={**made.provenance, "date": "2031-01-01"}).write(tmp_path / "later")
    with pytest.raises(UsageError, match=r"other settings \(recording.date\)"):
        run(str(tmp_path / "later"), tmp_path / "r.parquet")


def test_the_same_settings_replace_their_result(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    rows = run(folder, out)
    assert run(folder, out) == rows
    again = run(folder, out, agents=["exhaustive", "random"])
    key = lambda row: sorted((k, str(v)) for k, v in row.items())  # noqa: E731
    assert sorted(again, key=key) == sorted(rows, key=key)
    assert read_comparison(out).agents == ("exhaustive", "random")


def test_what_is_no_comparison_is_not_replaced(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    out.write_text("precious")
    with pytest.raises(UsageError, match="no comparison can be read.*--no-resume"):
        run(folder, out)
    assert out.read_text() == "precious" and not (tmp_path / "r.parquet.jsonl").exists()


# The command


def outblas(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


def test_the_command_prints_every_figure_and_writes_the_file(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    result = outblas(
        "compare", "--agents", "random,exhaustive", "--budgets", "0,1,16", "--seeds", "2", "--held-out", "0.5",
        "--splits", "shapes,families", "--device", f"replay:{folder}", "--out", str(out), "--sample", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    comparison = read_comparison(out)
    assert comparison.splits == ("shapes", "families") and comparison.meta["splits"]["shapes"]["searched"] == 3
    lines = [line.split() for line in result.stdout.splitlines()]
    assert sum(line[:1] == ["random"] and len(line) == 9 for line in lines) == 2
    assert "no agent is significantly best: " in result.stdout, "with three problems, intervals overlap"
    assert result.stdout.endswith(f"\nshow it: outblas report {out}\n"), "a command has no label of a file"
    assert "budget 16: " in result.stdout
    mean = math.exp(
        np.log(comparison.quality[(comparison.split == 0) & (comparison.agent == 0) & (comparison.budget == 2)]).mean()
    )
    assert f"{mean:.3f}" in next(line for line in lines if line[:1] == ["random"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "replay:nowhere"], "recording 'nowhere' does not exist"),
        (["--budgets", "1,two"], "--budgets '1,two'"),
        (["--agents", "oracle"], "unknown agent 'oracle'"),
        (["--held-out", "2"], "held-out share is 2"),
        (["--device", "cpu"], "unknown device"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], words: str, folder: str, tmp_path: Path) -> None:
    result = outblas("compare", "--device", f"replay:{folder}", "--out", str(tmp_path / "r.parquet"), *arguments)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_live_gpu_has_no_exhaustive_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outblas.runtime.device.gpu_count", lambda: 1)
    result = outblas("compare", "--device", "cuda:0")
    assert result.exit_code == 2 and "expected a recording" in result.stderr
