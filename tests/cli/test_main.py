"""The command line: good input reaches the right function, bad input is one line and exit 2."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas import __version__
from outblas.cli.command_table import commands
from outblas.cli.main import app
from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.runtime import device
from support.cli_fixture import assert_refused, outblas, two_gpus_fixture  # noqa: F401
from support.gpus.known import H200
from support.helpers import ROOT, SOURCE_PATH

EVAL = ["eval", "--mnk", "64_4096_64"]
COMMANDS = (
    *("eval", "bench", "record", "capture", "tune", "train", "train-llm"),
    *("build-library", "fit", "profile", "compare", "report", "results"),
    *("export", "export-t4", "import-t4", "doctor", "list"),
)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)


def calls_of(monkeypatch: pytest.MonkeyPatch, module: str, function: str, answer: Any = None) -> list[dict[str, Any]]:
    """Put a stand-in for ``module.function`` in place; the list fills with the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def stand_in(*arguments: Any, **named: Any) -> Any:
        calls.append({**dict(enumerate(arguments)), **named})
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(importlib.import_module(module), function, stand_in)
    return calls


# Help and names


def test_help_names_every_command_and_every_option_says_what_it_is() -> None:
    assert all(name in outblas("--help").stdout for name in COMMANDS)
    for name in COMMANDS:
        result = outblas(name, "--help")
        assert result.exit_code == 0
        options = [line for line in result.stdout.splitlines() if line.strip().startswith("--")]
        assert all(len(line.split()) > 2 or "--help" in line for line in options), options


def test_no_arguments_prints_the_help() -> None:
    result = outblas()
    assert "Usage:" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_version() -> None:
    result = outblas("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"outblas {__version__}")


def test_list_prints_the_names_that_commands_take() -> None:
    text = outblas("list").stdout
    assert all(
        name in text
        for name in (
            "grid1000",
            "llm",
            "llm_tp",
            "heuristic",
            "random",
            "sm90_wgmma_gemm",
            "sm80_mma_gemm",
            "sm80_gemv_mma",
        )
    )
    assert "grid1000" not in outblas("list", "agents").stdout
    assert_refused(outblas("list", "planets"), "planets", "suites")


# Bad input, before any work is done


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--mnk", "64_4096"], ["--mnk", "M_N_K"]),
        (["eval", "--mnk", "64_x_64"], ["--mnk"]),
        (["eval", "--mnk", "0_64_64"], ["M is 0", "a positive integer"]),
        (["eval", "--mnk", "64_-1_64"], ["N is -1"]),
        (["eval", "--mnk", "65536_65536_1"], ["operand C", "32-bit"]),
        ([*EVAL, "--layout", "nt"], ["layout", "TN or NN"]),
        ([*EVAL, "--dtype", "fp8"], ["dtype", "fp16 or bf16"]),
        ([*EVAL, "--acc", "fp64"], ["accumulator"]),
        ([*EVAL, "--dtype", "bf16", "--acc", "fp16"], ["accumulator fp16"]),
        ([*EVAL, "--mode", "online"], ["mode 'online'", "offline or server"]),
        ([*EVAL, "--mode", "server"], ["--target-qps", "missing"]),
        ([*EVAL, "--mode", "server", "--target-qps", "0"], ["--target-qps is 0"]),
        ([*EVAL, "--mode", "server", "--target-qps", "-5"], ["--target-qps is -5"]),
        ([*EVAL, "--mode", "server", "--target-qps", "nan"], ["--target-qps is nan"]),
        ([*EVAL, "--target-qps", "100"], ["--target-qps", "server"]),
        ([*EVAL, "--benchmark-seconds", "0"], ["--benchmark-seconds is 0"]),
        ([*EVAL, "--benchmark-seconds", "inf"], ["--benchmark-seconds is inf"]),
        ([*EVAL, "--warmup-seconds", "-1"], ["--warmup-seconds is -1"]),
        ([*EVAL, "--device", "cuda:-1"], ["device 'cuda:-1'", "cuda:N"]),
        ([*EVAL, "--device", "replay:h200"], ["--device replay:h200", "a GPU"]),
        ([*EVAL, "--gpu_device_id", "one"], ["--gpu-device-id", "a valid integer", "outblas eval --help"]),
        ([*EVAL, "--colour"], ["--colour"]),
        (["eval"], ["--mnk"]),
        (["evaluate"], ["evaluate"]),
        (["bench", "--suite", "grid9"], ["suite 'grid9'", "grid1000, llm, llm_tp or engine"]),
        (["bench", "--mode", "fast"], ["mode 'fast'"]),
        (["bench", "--mode", "server"], ["--target-qps"]),
        (["bench", "--layout", "tt"], ["layout"]),
        (["bench", "--sample", "0"], ["--sample is 0", "1 to 1000"]),
        (["tune", "--mnk", "64_64_64", "--sample", "5"], ["--sample conflicts with --mnk"]),
        (["bench", "--rounds", "3"], ["--rounds is 3", "7 or more"]),
        (["bench", "--gpus", "0,zero"], ["--gpus"]),
        (["bench", "--gpus", "0,0"], ["GPU indices"]),
        (["bench", "--gpus", ""], ["--gpus ''", "integers"]),
        (["bench", "--library", "no_such_file.json"], ["no_such_file.json"]),
        (["record", "--suite", "x"], ["suite 'x'"]),
        (["record", "--acc", "int8"], ["accumulator"]),
        (["tune", "--suite", "nope"], ["suite 'nope'"]),
        (["tune", "--mnk", "1_2"], ["--mnk"]),
        (["tune", "--budget", "0"], ["--budget is 0"]),
        (["tune", "--device", "tpu:0"], ["device 'tpu:0'", "replay:"]),
        (["tune", "--device", "replay:"], ["device"]),
        (["tune", "--device", "replay:no_such_recording"], ["no_such_recording"]),
        (["report", "no_such_run"], ["no_such_run"]),
        (["results", "--dir", "no_such_directory"], ["no_such_directory"]),
    ],
    ids=lambda value: " ".join(value[1:]) if value and value[0] in COMMANDS else "",
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: Sequence[str], words: Sequence[str], two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(outblas(*arguments), *words)
    assert list(tmp_path.iterdir()) == [], "nothing is written for bad input"


@pytest.mark.parametrize("arguments", [EVAL, ["bench"], ["record"], ["tune", "--device", "cuda:0"]], ids=lambda a: a[0])
def test_a_gpu_demanded_where_there_is_none_is_one_line(arguments: Sequence[str], no_gpu: None) -> None:
    result = outblas(*arguments)
    assert_refused(result, "no CUDA GPU")
    assert ("replay:h200" in result.stderr) == (arguments[0] == "tune"), "only tune accepts a recording"


@pytest.mark.parametrize("arguments", [[*EVAL, "--device", "cuda:2"], ["tune", "--device", "cuda:7"]])
def test_a_gpu_index_that_is_not_there_is_one_line(arguments: Sequence[str], two_gpus: None) -> None:
    assert_refused(outblas(*arguments), "no such GPU", "0 to 1")


def test_the_real_command_refuses_in_one_line_without_a_traceback() -> None:
    for arguments in (["eval", "--mnk", "0_1_1"], ["bench", "--suite", "grid9"], ["tune", "--device", "gpu"]):
        done = subprocess.run(
            [sys.executable, "-m", "outblas", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": SOURCE_PATH},
        )
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ")


# Errors from below, and Ctrl-C


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RecordError("the disk is full", "free space", "free some"), ["the disk is full"]),
        (OSError(28, "No space left on device", "/results/x"), ["No space left", "/results/x"]),
        (PermissionError(13, "Permission denied", "/results"), ["Permission denied"]),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), ["torch", "outblas[gpu]"]),
        (RecordError("two\nlines", "one", "join them"), ["two lines"]),
        (RecordError("r\x1b[2J\udcff\x9b2J\u202e.json", "a file", "move it"), ["r[2J?2J.json"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_from_below_is_one_line(
    error: BaseException, words: Sequence[str], two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_of(monkeypatch, "outblas.tune.eval_problem", "run_eval", error)
    assert_refused(outblas(*EVAL), *words)


def test_a_defect_of_ours_is_not_hidden(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, "outblas.tune.eval_problem", "run_eval", ZeroDivisionError("defect"))
    assert isinstance(outblas(*EVAL).exception, ZeroDivisionError)


def test_ctrl_c_says_how_to_resume_and_exits_130(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["outblas", "bench", "--suite", "llm"])
    calls_of(monkeypatch, "outblas_lab.pool.run_bench", "run_bench", KeyboardInterrupt())
    result = outblas("bench", "--suite", "llm")
    assert result.exit_code == 130
    assert "resume with: outblas bench --suite llm" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_command_without_a_journal_promises_nothing(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, two_gpus: None, tmp_path: Path
) -> None:
    calls_of(monkeypatch, "outblas_lab.train.choose_catalogue", "read_rows", error)
    calls_of(monkeypatch, "outblas.tune.eval_problem", "run_eval", error)
    store = tmp_path / "store.sqlite"
    store.touch()
    for arguments in (EVAL, ["-q", "fit", "catalogue", "--store", str(store), "--out", str(tmp_path / "c.json")]):
        monkeypatch.setattr(sys, "argv", ["outblas", *arguments])
        result = outblas(*arguments)
        if isinstance(error, KeyboardInterrupt):
            assert result.exit_code == 130 and "interrupted; nothing was kept" in result.stderr
            assert f"run again with: outblas {' '.join(arguments)}" in result.stderr
        else:
            assert_refused(result, "out of memory")
        assert "resume" not in result.stderr and "is kept" not in result.stderr


@pytest.mark.parametrize("name", sorted({name for one in commands().values() for name in one.resumable}))
def test_what_is_said_to_be_resumable_is_a_command(name: str) -> None:
    assert outblas(*name.split(), "--help").exit_code == 0


# Arguments reach the functions behind


def test_eval_passes_its_arguments_on_and_prints_what_comes_back(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"name": "outblas", "us": 1.25, "tflops": 26.8, "floor_percent": 80.0},
        {"name": "lt_auto", "us": 1.5, "tflops": 22.4, "speedup": 1.2, "low": 1.15, "high": 1.25},
    ]
    calls = calls_of(monkeypatch, "outblas.tune.eval_problem", "run_eval", {"rows": rows, "file": "results/x.json"})
    result = outblas(
        *EVAL, "--acc", "FP32", "--layout", "nn", "--mode", "server", "--target-qps", "100", "--warmup-seconds", "0",
        "--benchmark-seconds", "0.5", "--base-dir", str(tmp_path), "--device", "cuda:1",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert list(calls[0].values()) == [Problem(64, 4096, 64, "NN"), "server", 100.0, 0.0, 0.5, tmp_path, 1]
    for text in ("64_4096_64_NN_fp16_fp32", "outblas", "lt_auto", "1.250", "26.8", "1.200", "1.150", "results/x.json"):
        assert text in result.stdout


@pytest.mark.parametrize("more", [[], ["--file", "kernel.cu"]], ids=["ours", "free"])
@pytest.mark.parametrize("base_dir", ["file", "file/folder"])
def test_eval_refuses_a_file_as_its_directory_before_any_work(
    base_dir: str, more: list[str], two_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = calls_of(monkeypatch, "outblas.tune.eval_problem", "run_eval", {})
    calls_free = calls_of(monkeypatch, "outblas_lab.pool.eval_file", "eval_file", {"status": "passed"})
    (tmp_path / "file").write_text("precious")
    assert_refused(outblas(*EVAL, *more, "--base-dir", str(tmp_path / base_dir)), "--base-dir", "a writable folder")
    assert calls == calls_free == [] and (tmp_path / "file").read_text() == "precious"


def test_bench_passes_its_arguments_on(two_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = calls_of(monkeypatch, "outblas_lab.pool.run_bench", "run_bench", RecordError("stop here", "it", "."))
    path = tmp_path / "r.parquet"
    outblas(
        "bench",
        "--suite",
        "llm",
        "--layout",
        "both",
        "--dtype",
        "bf16",
        "--gpus",
        "1,0",
        "--no-resume",
        "--out",
        str(path),
    )
    request = calls[0][0]
    assert {p.layout for p in request.problems} == {"TN", "NN"}
    assert {p.dtype for p in request.problems} == {"bf16"}
    assert (request.suite, request.gpu_indices, request.resume, request.out_path) == ("llm", (1, 0), False, path)
    assert (request.mode, request.target_qps, request.library) == ("offline", None, None)


def test_bench_replaces_no_result_of_other_problems(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = calls_of(monkeypatch, "outblas_lab.pool.run_bench", "run_bench", RecordError("stop here", "it", "."))
    path = tmp_path / "r.parquet"
    shutil.copy(ROOT / "results/h200/llm_tn_fp16_fp32_offline.parquet", path)
    llm = ("bench", "--suite", "llm", "--out", str(path))
    for other in (["--dtype", "bf16"], ["--sample", "10"], ["--mode", "offline_cold"]):
        assert_refused(outblas(*llm, *other), "in mode offline of 330 problems", "--no-resume")
    assert calls == []
    outblas(*llm)
    outblas(*llm, "--dtype", "bf16", "--no-resume")
    path.write_text("precious")
    assert_refused(outblas(*llm), "no bench can be read", "--no-resume")
    assert len(calls) == 2 and path.read_text() == "precious"


def test_bench_of_a_sample_takes_the_same_shapes_in_both_layouts(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, "outblas_lab.pool.run_bench", "run_bench", RecordError("stop here", "it", "."))
    outblas("bench", "--layout", "both", "--sample", "100", "--seed", "3")
    problems = calls[0][0].problems
    shapes = {layout: [p.mnk for p in problems if p.layout == layout] for layout in ("TN", "NN")}
    assert shapes["TN"] == shapes["NN"] and len(shapes["TN"]) == 100
    assert calls[0][0].out_path.name == "grid1000_both_fp16_fp32_offline_sample100.parquet"


def test_tune_of_a_sample_is_another_run_than_that_of_the_suite(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, "outblas.tune.tune_run", "run_tune", RecordError("stop here", "it", "."))
    for arguments in ((), ("--sample", "10"), ("--sample", "10", "--seed", "1")):
        outblas("tune", "--device", "cuda:0", *arguments)
    whole, drawn, other = (call[0].problems for call in calls)
    assert len(whole) == 1000 and len(drawn) == len(other) == 10 and drawn != other
    assert len({str(call[0].path) for call in calls}) == 3, "the whole suite's directory is not a sample's"


def test_tune_of_other_problems_or_another_seed_has_a_directory_of_its_own(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, "outblas.tune.tune_run", "run_tune", RecordError("stop here", "it", "."))
    one, other = ("--mnk", "64_64_64"), ("--mnk", "64_64_128")
    for arguments in (one, other, (*one, *other), (*one, "--seed", "1"), one):
        outblas("tune", "--device", "cuda:0", *arguments)
    paths = [str(call[0].path) for call in calls]
    assert len(set(paths)) == 4 and paths[0] == paths[4] and "64_64_64" in paths[0]


def test_record_passes_its_arguments_on(two_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = calls_of(monkeypatch, "outblas_lab.pool.record_suite", "run_record")
    monkeypatch.setattr("outblas.kernels.catalogue.catalogue", lambda name: (f"all of {name}",))
    monkeypatch.setattr("outblas.runtime.device.gpu_of_device", lambda index: H200)
    result = outblas("record", "--layout", "nn", "--out", str(tmp_path), "--device", "cuda:1")
    assert result.exit_code == 0, result.stderr
    call = calls[0]
    assert (len(call["problems"]), call["suite"], call["out_dir"], call["gpu_index"]) == (1000, "grid1000", tmp_path, 1)
    assert {p.layout for p in call["problems"]} == {"NN"}
    assert call["catalogue"] == ("all of h200",)


def test_without_a_device_the_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    assert str(device.parse_device(None)) == "cuda:0"
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    assert str(device.parse_device(None)) == "replay:h200"


# Doctor


@pytest.mark.parametrize(
    ("ok", "required", "code"), [(True, True, 0), (False, False, 0), (None, False, 0), (False, True, 2)]
)
def test_doctor_fails_only_for_what_nothing_works_without(
    ok: bool | None, required: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import outblas.cli.checks.health

    check = outblas_doctor_check(ok, required)
    monkeypatch.setattr(outblas.cli.checks.health, "diagnose", lambda: [check])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "the thing  found this; do that" in result.stdout


def outblas_doctor_check(ok: bool | None, required: bool) -> Any:
    from outblas.cli.checks.health import Check

    return Check("the thing", ok, "found this", "do that", required)


@pytest.mark.parametrize("agent", ["recorded", "transfer"])
def test_the_agent_that_reads_a_recording_is_refused_on_one(agent: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_refused(
        outblas("tune", "--agent", agent, "--device", "replay:h200", "--run", str(run)),
        agent,
        "would already know the answers",
    )
    assert not run.exists()
