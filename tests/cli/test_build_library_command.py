"""`outblas build-library` on the command line: its help, its refusals, and what one job of it answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.errors import UsageError
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.core.process_group import Ended
from outblas_lab.build import build_run
from outblas_lab.build.build_work import TABLES, BuildFolder
from support.cli_fixture import assert_refused, refused

TABLE = str(TABLES[0])


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["build-library", *arguments], env={"COLUMNS": "200"})


def test_help_names_every_step_and_option() -> None:
    text = command("--help").stdout
    lines = [line.strip() for line in text.splitlines()]
    for step in build_run.STEPS:
        assert any(line.startswith(f"{step} ") for line in lines), step
    for option in (
        "work",
        "tables",
        "steps",
        "modes",
        "extra",
        "recorded",
        "starts",
        "from-nothing",
        "begin-with",
    ):
        assert f"--{option}" in text

    assert "--job" not in text, "it is for the command itself"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tables", "grid1000:TN"], "SUITE:LAYOUT:DTYPE:ACC"),
        (["--extra", "grid1:TN:fp16:fp32"], "grid1"),
        (["--recorded", "grid1000:TN:bf16:fp16"], "fp16"),
        (["--steps", "record,guess"], "--steps guess"),
        (["--modes", "hot"], "--modes hot"),
        (["--job", f"guess {TABLE}"], "--job"),
        (["--job", "tune"], "--job"),
        (["--job", f"bench {TABLE}"], "--job"),
        (["--job", f"bench {TABLE} hot"], "--job"),
        (["--job", f"tune {TABLE} offline"], "--job"),
        (["--job", f"trial {TABLE} 10"], "--job"),
        (["--job", f"judge {TABLE} 4"], "--job"),
        (["--starts", "10"], "--starts"),
        (["--begin-with", "missing.json"], "missing.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(arguments: list[str], told: str, tmp_path: Path) -> None:
    assert told in refused(command("--work", str(tmp_path / "work"), *arguments))


def test_a_work_directory_is_wanted() -> None:
    done = command("--steps", "merge")
    assert done.exit_code == 2 and "--work" in done.stderr


def test_a_file_is_no_work_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--work" in refused(command("--work", str(tmp_path / "file"), "--steps", "merge"))


def test_two_builds_do_not_share_a_directory(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        line = refused(command("--work", str(tmp_path), "--steps", "merge"))
    assert f"{tmp_path} is in use by another process" in line


def test_a_job_runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(build_run, "run_job", lambda work, job: ran.append((work, job)))
    words = ["--work", str(tmp_path), "--gpus", "3", "--from-nothing", "--job", f"bench {TABLE} server"]
    assert command(*words).exit_code == 0
    assert ran == [(BuildFolder(tmp_path, (3,), True), ["bench", TABLE, "server"])]


def test_a_job_is_started_by_a_command_that_means_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(build_run, "run_job", lambda work, job: ran.append((work, job)))
    work, job = BuildFolder(tmp_path, (1, 0), True), ["bench", TABLE, "offline"]
    python, *module, name = build_run.command_of_job(work, job)[:4]
    assert (python, module, name) == (sys.executable, ["-m", "outblas"], "build-library")
    assert command(*build_run.command_of_job(work, job)[4:]).exit_code == 0
    assert ran == [(work, job)]


def test_a_job_that_is_interrupted_or_refused_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: BuildFolder, job: list[str]) -> None:
        raise error

    monkeypatch.setattr(build_run, "run_job", fails)
    error: BaseException = KeyboardInterrupt("3 of 9 recorded")
    done = command("--work", str(tmp_path), "--job", f"tune {TABLE}")
    assert (done.exit_code, done.stderr) == (130, "interrupted: 3 of 9 recorded\n")
    error = UsageError("other kernels", "these", "choose another --work")
    assert refused(command("--work", str(tmp_path), "--job", f"tune {TABLE}")) == f"error: {error}"


def test_an_interrupted_build_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_run, "run_to_end", lambda words, counts_repeats: Ended(130, interrupted=True))
    monkeypatch.setattr("sys.argv", ["outblas", "build-library", "--work", str(tmp_path)])
    done = command("--work", str(tmp_path), "--steps", "merge")
    assert done.exit_code == 130
    assert f"resume with: outblas build-library --work {tmp_path}" in done.stderr


@pytest.mark.parametrize("name", ["work.json", "seconds.json"])
@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_file_of_a_build_is_one_line(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_run, "run_to_end", lambda words, counts_repeats: Ended(0, interrupted=False))
    (tmp_path / name).write_text(text)
    words = ("--job", f"merge {TABLE}") if name == "work.json" else ("--steps", "merge", "--tables", TABLE)
    assert_refused(command("--work", str(tmp_path), *words), f"{name} cannot be read")
    assert (tmp_path / name).read_text() == text


def test_a_job_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A real process: it is refused, as the directory says that it is of other kernels."""
    (tmp_path / "work.json").write_text('{"kernels": "others", "nvrtc": "none", "gpu": "none"}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = command("--work", str(tmp_path), "--steps", "merge", "--tables", TABLE)
    assert done.exit_code == 2 and f"merge {TABLE} failed with status 2" in done.stderr
    assert capfd.readouterr().err.startswith("error: "), "the job's own error"
    assert (tmp_path / "seconds.json").exists()


def test_the_default_is_every_published_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def done(words: list[str], counts_repeats: bool) -> Ended:
        commands.append(words)
        return Ended(0, interrupted=False)

    monkeypatch.setattr(build_run, "run_to_end", done)
    monkeypatch.setattr("outblas.core.suites.suite", lambda *_: [Problem(64, 64, 64)])
    assert command("--work", str(tmp_path), "--modes", "offline,server").exit_code == 0
    jobs = [words[-1] for words in commands]
    steps = ("tune", "borrow", "refine", "trial", "choose", "judge", "merge")
    starts = {"trial": (" 1", " 2", " 3", " block"), "judge": (" 1", " 2", " 3", " block")}
    each = [f"{step} {t}{start}" for step in steps for start in starts.get(step, ("",)) for t in TABLES]
    benches = [*(f"bench {table} offline" for table in TABLES), f"bench {TABLE} server"]
    trials = [f"trial_workloads {TABLE} {mode}" for mode in ("offline_cold", "server")]
    judged = each.index(f"judge {TABLES[0]} 1")
    seconds = [*trials, f"choose_workloads {TABLE}"]
    assert jobs == [f"record {TABLE}", *each[:judged], *seconds, *each[judged:], *benches]


def test_the_module_runs_it_too() -> None:
    done = subprocess.run([sys.executable, "-m", "outblas", "build-library"], capture_output=True, text=True)
    assert done.returncode == 2 and "--work" in done.stderr and len(done.stderr.splitlines()) == 1
