"""The help page, the global options, and tables that are never cut."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outblas.cli import common
from outblas.cli.checks.health import TUNE, Check
from outblas.cli.command_table import commands, parts
from outblas.cli.common import err
from outblas.cli.doctor import REPLAY, verdict_of
from outblas.cli.main import app
from outblas.core.errors import unknown_name
from support.bench_fixture import write_bench
from support.cli_fixture import assert_refused, outblas, recording_fixture  # noqa: F401
from support.helpers import synthetic_recording

SUMMARIES = {name: command.summary for name, command in commands().items()}
MNK = synthetic_recording().problems[0].mnk


@pytest.fixture(autouse=True)
def loud_again() -> Iterator[None]:
    yield
    err.quiet = False
    logging.getLogger("outblas").setLevel(logging.NOTSET)


def test_every_command_has_a_summary_of_at_most_50_characters() -> None:
    import typer

    assert set(SUMMARIES) == set(typer.main.get_command(app).commands)
    assert [part.title for part in parts()] == [
        "Tune and use kernels",
        "Study search and models",
        "Measure and publish",
        "Build packaged data",
    ]
    for name, summary in SUMMARIES.items():
        assert 10 < len(summary) <= 50 and not summary.endswith(("...", ".")), name


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_page_shows_whole_summaries_in_parts(flag: str) -> None:
    text = CliRunner().invoke(app, [flag], env={"COLUMNS": "100"}).stdout
    for part in parts():
        assert f"{part.title}:\n" in text
    for name, summary in SUMMARIES.items():
        assert any(line.split(None, 1) == [name, summary] for line in text.splitlines()), name
    assert "--install-completion" in text and "..." not in text.split("kernels:")[1]
    assert CliRunner().invoke(app, ["tune", flag]).exit_code == 0


@pytest.mark.parametrize(("name", "words"), [("train", "policy of the agent `ppo`"), ("import-t4", "compare")])
def test_a_summary_says_what_the_help_of_its_command_says(name: str, words: str) -> None:
    assert words in SUMMARIES[name] and words in outblas(name, "--help").stdout


@pytest.mark.parametrize("group", [(), ("recording",), ("fit",)])
def test_no_arguments_print_the_whole_help_page(group: tuple[str, ...]) -> None:
    result = outblas(*group)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr == outblas(*group, "--help").stdout
    assert "..." not in result.stderr.split("--help", 1)[1]


def test_a_wrong_global_option_is_the_line_of_any_other_error() -> None:
    assert_refused(outblas("--nope"), "--nope", "outblas --help")
    done = subprocess.run([sys.executable, "-m", "outblas", "--nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_version_has_a_short_form() -> None:
    assert outblas("-V").stdout == outblas("--version").stdout != ""


def test_quiet_leaves_results_and_errors(tmp_path: Path, recording: str) -> None:
    arguments = ["tune", "--mnk", MNK, "--device", f"replay:{recording}", "--agent", "random", "--budget", "2"]
    loud = outblas(*arguments, "--run", str(tmp_path / "loud"))
    quiet = outblas("-q", *arguments, "--run", str(tmp_path / "quiet"))
    assert loud.exit_code == quiet.exit_code == 0, (loud.stderr, quiet.stderr)
    assert loud.stderr and not quiet.stderr
    assert loud.stdout.replace("loud", "quiet") == quiet.stdout
    assert_refused(outblas("-q", "tune", "--budget", "0"), "--budget is 0")


def test_progress_off_a_terminal_is_a_line_for_each_tenth_and_for_each_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 120.0, 140.0, 141.0, 169.0])
    monkeypatch.setattr(common, "monotonic", lambda: next(clock))
    with common.progress_bar("work") as progress:
        for done in (0, 1, 2, 10, 11):
            progress(done, 100, "a note")
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["work: 0/100 a note", "work: 2/100 a note", "work: 10/100 a note"]


def test_verbose_logs_details() -> None:
    assert outblas("-v", "list", "agents").exit_code == 0
    assert logging.getLogger("outblas").level == logging.DEBUG
    assert outblas("list", "agents").exit_code == 0
    assert logging.getLogger("outblas").level == logging.WARNING


@pytest.mark.parametrize("columns", ["40", "80"])
def test_figures_are_never_cut(columns: str, tmp_path: Path) -> None:
    write_bench(tmp_path / "h200" / "grid.parquet")
    text = CliRunner().invoke(app, ["results", "--dir", str(tmp_path / "h200")], env={"COLUMNS": columns}).stdout
    assert "…" not in text and "TN fp16/fp32" in text
    assert len({len(line.split()) for line in text.splitlines()[1:]}) == 1


def test_a_finished_run_says_so_and_shows_no_progress(tmp_path: Path, recording: str) -> None:
    arguments = ["tune", "--mnk", MNK, "--device", f"replay:{recording}", "--agent", "random"]
    arguments += ["--budget", "3", "--run", str(tmp_path / "run")]
    assert "resuming" not in outblas(*arguments).stderr
    (line,) = outblas(*arguments).stderr.splitlines()
    assert line == f"run {tmp_path / 'run'} is already finished: 1 problem; nothing to do"
    (tmp_path / "run" / "result.parquet").unlink()
    (line,) = outblas(*arguments).stderr.splitlines()
    assert line.endswith("nothing to do") and (tmp_path / "run" / "result.parquet").is_file()


def test_a_resumed_run_shows_progress_of_what_is_new(
    tmp_path: Path, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(what: str) -> Iterator[common.ProgressFn]:
        def update(done: int, total: int, note: object = "") -> None:
            if done == 2:
                raise KeyboardInterrupt

        yield update

    arguments = ["tune", "--mnk", MNK, "--device", f"replay:{recording}", "--agent", "random"]
    arguments += ["--budget", "3", "--run", str(tmp_path / "run")]
    with monkeypatch.context() as patched:
        patched.setattr(common, "progress_bar", interrupted)
        assert outblas(*arguments).exit_code == 130
    resumed = outblas(*arguments)
    assert resumed.exit_code == 0 and "already finished" not in resumed.stderr
    kept, shown = resumed.stderr.splitlines()[1:]
    assert kept.startswith("resuming ") and kept.endswith(" with 2 measurements") and shown.startswith("tune: 3/3")


def test_an_unknown_name_proposes_the_nearest() -> None:
    error = unknown_name("agent", "huristic", ["random", "heuristic", "tpe"], "pass one of them")
    assert str(error).startswith("unknown agent 'huristic'; expected random, heuristic or tpe; did you mean heuristic?")
    assert "did you mean" not in str(unknown_name("agent", "xyzzy", ["random"], "pass it"))


GPU, TORCH, NVRTC = (
    Check("gpu", True, "0: NVIDIA H200 (sm_90)"),
    Check("torch", True, "2.11"),
    Check("nvrtc", True, "13"),
)


@pytest.mark.parametrize(
    ("checks", "can", "cannot", "next_command"),
    [
        ([Check("recording", True, "h200")], "replay", "no NVIDIA GPU", REPLAY),
        (
            [Check("recording", None, "pyarrow is absent")],
            "export kernels as CUDA",
            "pyarrow is absent",
            "pip install 'outblas[tune]'",
        ),
        ([NVRTC], "list and explain, export kernels;", "(no outblas-lab), run or time", "pip install ./lab"),
        ([GPU], "export kernels as CUDA and C++", "torch: absent", "pip install 'outblas[gpu]'"),
        ([GPU, TORCH], "torch through", "neither NVRTC nor", "pip install 'outblas[gpu]'"),
        ([GPU, TORCH, NVRTC], "torch through", "no library for this GPU", TUNE),
        ([GPU, TORCH, NVRTC, Check("gpu library", None, "none", TUNE)], "tune", "no library for this GPU", TUNE),
        ([GPU, TORCH, NVRTC, Check("gpu library", True, "2000")], "outblas.enable()", "", "outblas eval"),
    ],
)
def test_the_verdict_says_what_works_and_the_next_command(
    checks: list[Check], can: str, cannot: str, next_command: str
) -> None:
    verdict = verdict_of(checks)
    assert can in verdict.line and cannot in verdict.line and verdict.next.startswith(next_command)
    assert verdict.line.endswith(f"next: {verdict.next}")


def test_doctor_ends_with_optional_parts_and_the_verdict_and_wraps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.cli.checks import health

    checks = [Check("gpu", None, "none"), Check("jail", True, "word " * 200), Check("disk", False, "full", "clear")]
    monkeypatch.setattr(health, "diagnose", lambda: checks)
    lines = outblas("doctor").stdout.splitlines()
    assert lines[-1].startswith("can: ") and "next: " in lines[-1]
    assert all(len(line) <= 120 for line in lines[:-1])
    assert lines[-5:-1] == ["fix    disk  full; clear", "not here, and optional:", "       gpu   none", ""]


def test_list_says_what_each_thing_is() -> None:
    text = outblas("list").stdout
    assert "recorded (h100: NN fp16/fp32, TN fp16/fp32; h200: NN fp16/fp32, TN fp16/fp32)" in text
    assert "not recorded" in text
    for line in outblas("list", "agents").stdout.splitlines()[1:]:
        assert len(line.split(None, 1)[1]) > 10
    assert "(extra kernel-tuner)" in text
    for kind in ("suites", "agents", "kernels", "counters"):
        lines = outblas("list", kind).stdout.splitlines()[1:]
        assert len({len(line) - len(line.split(None, 1)[1]) for line in lines}) == 1, kind


def test_eval_takes_the_spelling_of_cuda_l2() -> None:
    words = ["--warmup_seconds", "1", "--benchmark_seconds", "0", "--base_dir", ".", "--gpu_device_id", "0"]
    result = outblas("eval", "--mnk", "64_64_64", *words, "--target_qps", "5", "--mode", "server")
    assert_refused(result, "--benchmark-seconds is 0")
    assert "_seconds" not in outblas("eval", "--help").stdout, "a spelling of each option is enough"


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("size", ["0", "00", "-1", "x", "\u00b2", " 80", "9" * 5000, "100000", ""])
def test_an_odd_size_of_the_terminal_counts_as_unset(name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from outblas.cli.common import CleanConsole

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    unset = CleanConsole(file=io.StringIO()).size
    monkeypatch.setenv(name, size)
    console = CleanConsole(file=(sink := io.StringIO()))
    assert console.size == unset
    console.print("text")
    assert sink.getvalue() == "text\n"


def test_a_size_of_the_terminal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.cli.common import CleanConsole

    monkeypatch.setenv("COLUMNS", "97")
    monkeypatch.setenv("LINES", "31")
    assert tuple(CleanConsole().size) == (97, 31)
