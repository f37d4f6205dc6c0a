"""``outblas tune`` and ``outblas report``: a run's directory, its files, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.files import lock_run_folder
from outblas.core.problem import Problem
from outblas.records.library import Library
from outblas.records.result_rows import launch_of_row
from outblas.records.results import read_result
from outblas_lab.recordings.replay import ReplayEvaluator
from support.cli_fixture import assert_refused, outblas, recording_fixture  # noqa: F401
from support.gpus.known import H200

# The whole of tune, on a synthetic recording


def tune_arguments(recording: str, run: Path, **changed: str) -> list[str]:
    options = {"--agent": "random", "--budget": "4", "--device": f"replay:{recording}", "--run": str(run), **changed}
    mnk = ["--mnk", "64_128_256", "--mnk", "128_128_256"]
    return ["tune", *mnk, *(word for pair in options.items() for word in pair)]


def test_tune_writes_everything_it_says(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    result = outblas(*tune_arguments(recording, run))
    assert result.exit_code == 0, result.stderr
    for name in ("library.json", "result.parquet", "report.html", "run.json"):
        assert (run / name).stat().st_size > 0
    assert all(f"{run / name}" in result.stdout for name in ("library.json", "result.parquet", "report.html"))
    library = Library.load(run / "library.json")
    rows = read_result(run / "result.parquet").rows
    assert [(r["m"], r["pdl"]) for r in rows] == [(64, False), (64, True), (128, False), (128, True)]
    for row in rows:
        choice = library.lookup(Problem.from_json(row)).choice(launch_of_row(row))  # type: ignore[union-attr]
        assert row["fallback"] == (choice is None)
        assert row["published"] == pytest.approx(1.0 if choice is None else choice.speedup)
        if choice is not None:
            assert row["speedup"] == pytest.approx(row["baseline_us"] / row["ours_us"], rel=1e-5)
    about = json.loads((run / "run.json").read_text())
    assert about["device"] == f"replay:{recording}"
    assert about["recording"]["provenance"]["gpu"] == "NVIDIA H200"


def test_tuning_again_resumes_and_gives_the_same(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    first = (run / "library.json").read_bytes()
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    assert (run / "library.json").read_bytes() == first


@pytest.mark.parametrize(("option", "value"), [("--budget", "5"), ("--agent", "heuristic"), ("--seed", "3")])
def test_a_run_of_other_settings_is_not_resumed(recording: str, tmp_path: Path, option: str, value: str) -> None:
    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.suffix in (".json", ".parquet")}
    result = outblas(*tune_arguments(recording, run, **{option: value}))
    assert result.exit_code == 2
    assert option.removeprefix("--") in result.stderr
    assert "pass another --run" in result.stderr
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.suffix in (".json", ".parquet")} == before


def test_on_a_recording_the_policy_proposes_unless_another_agent_is_named(recording: str, tmp_path: Path) -> None:
    arguments = tune_arguments(recording, tmp_path / "one")
    at = arguments.index("--agent")
    assert outblas(*arguments[:at], *arguments[at + 2 :]).exit_code == 0
    assert json.loads((tmp_path / "one" / "run.json").read_text())["agent"] == "regressor"


def test_a_directory_that_is_no_run_is_left_alone(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "thesis.txt").write_text("precious")
    result = outblas(*tune_arguments(recording, run))
    assert result.exit_code == 2
    assert "is not a run" in result.stderr
    assert [p.name for p in run.iterdir()] == ["thesis.txt"]


def test_a_run_that_was_killed_before_it_had_a_name_is_begun(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    run.mkdir()
    (run / ".run.json.123.tmp").write_text("{")
    assert outblas(*tune_arguments(recording, run)).exit_code == 0


def test_a_run_is_not_resumed_on_another_kind_of_gpu(
    recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(ReplayEvaluator):
        gpu = replace(H200, name="b200")

    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    before = (run / "run.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("outblas_lab.recordings.recordings_for_search.replay", Other)
        assert_refused(outblas(*tune_arguments(recording, run)), "other settings (gpu)", "gpu='h200'", "another --run")
    assert (run / "run.json").read_bytes() == before
    older = {key: value for key, value in json.loads(before).items() if key != "gpu"}
    (run / "run.json").write_text(json.dumps(older))
    assert outblas(*tune_arguments(recording, run)).exit_code == 0, "a run that does not say goes on"


def test_a_run_that_another_process_works_in_is_refused_and_can_be_read(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    before = (run / "run.json").read_bytes()
    with lock_run_folder(run):
        assert_refused(outblas(*tune_arguments(recording, run)), "in use by another process", "wait until it ends")
        assert outblas("report", str(run)).exit_code == 0
    assert (run / "run.json").read_bytes() == before
    assert outblas(*tune_arguments(recording, run)).exit_code == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}'])
def test_a_damaged_run_json_is_one_line(recording: str, tmp_path: Path, content: str) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "run.json").write_text(content)
    result = outblas(*tune_arguments(recording, run))
    assert result.exit_code == 2
    assert_refused(result, "run.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"--agent": "oracle"}, ["agent 'oracle'", "heuristic"]), ({"--mnk": "1_1_1"}, ["1_1_1", "not in the recording"])],
)
def test_bad_settings_leave_no_run_directory(
    recording: str, tmp_path: Path, change: dict[str, str], words: list[str]
) -> None:
    run = tmp_path / "one"
    result = outblas(*tune_arguments(recording, run, **change))
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words)
    assert not run.exists()


def test_report_writes_beside_a_result_file_and_into_a_run(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    page = run / "report.html"
    page.unlink()
    assert str(page) in outblas("report", str(run)).stdout
    assert page.stat().st_size > 0
    result = outblas("report", str(run / "result.parquet"))
    assert result.exit_code == 0
    assert (run / "result.html").exists()


def test_a_truncated_result_is_one_line(recording: str, tmp_path: Path) -> None:
    run = tmp_path / "one"
    assert outblas(*tune_arguments(recording, run)).exit_code == 0
    whole = (run / "result.parquet").read_bytes()
    (run / "result.parquet").write_bytes(whole[: len(whole) // 2])
    assert_refused(outblas("report", str(run)), "result.parquet")
