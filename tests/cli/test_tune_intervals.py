"""``outblas tune --linear``, ``--captured`` and ``--intervals``: from the options to the user's library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.cli.checks.health import gpu_library_part
from outblas.cli.tune import model_file, ranges_and_others
from outblas.core.errors import UsageError
from outblas.core.phase_times import PhaseTotals
from outblas.core.problem import Problem
from outblas.core.weight import Weight
from outblas.dispatch.decide import decide
from outblas.records import provenance
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from outblas.records.library import Library
from outblas.records.results import read_result
from outblas.runtime import device
from outblas.runtime.device import parse_device
from outblas.tune import tune_run
from outblas.tune.intervals.cells import SAMPLED
from support.cli_fixture import assert_refused, outblas, recording_fixture  # noqa: F401
from support.dispatch_fixture import rows, transposed
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL, Model, ModelledEvaluator

WEIGHT = Weight(128, 256)


def small_below_100(m: int) -> float:
    return 1.4 if m < 100 else 0.8


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A fake GPU on which SMALL wins below M = 100 and LARGE above; and the home of its user."""
    made = Model({SMALL: small_below_100, LARGE: lambda m: 1.2})

    @contextmanager
    def opened(*_: object) -> Iterator[ModelledEvaluator]:
        yield ModelledEvaluator(made)

    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: None)
    monkeypatch.setattr(tune_run, "open_evaluator", opened)
    monkeypatch.setattr("outblas.tune.time_shares.gpu_of_device", lambda index: H200)
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return made


def tune(run: Path, *arguments: str) -> Any:
    return outblas(
        "tune", *arguments, "--device", "cuda:0", "--agent", "exhaustive", "--budget", "4", "--run", str(run)
    )


LINEAR = ("--linear", "128_256", "--m", "1:512")


def kernel_at(library: Library, m: int, weight: Weight = WEIGHT) -> Any:
    row = library.lookup(weight.problem(m))
    return None if row is None else row.plain and row.plain.config


def test_a_weight_is_tuned_for_a_range_and_installed(model: Model, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = tune(run, *LINEAR, "--linear", "256_128", "--install")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "tuning 2 weights for ranges of M of linear on cuda:0" in result.stderr
    assert "128 x 256: search" in result.stderr and "256 x 128: done" in result.stderr
    assert "128_256_TN_fp16_fp32: 2 intervals over M 1..512, 2 with a kernel" in result.stdout
    own = tmp_path / "data" / "outblas" / "libraries" / "h200.json"
    assert f"installed: {own} (0 problems, 0 new or better, 4 intervals)" in result.stdout
    for name in ("library.json", "result.parquet", "report.html"):
        assert f"{run / name}" in result.stdout and (run / name).stat().st_size > 0
    for library in (Library.load(run / "library.json"), Library.load(own)):
        assert [(one.first, one.last) for one in library.intervals] == [(1, 99), (100, 512)] * 2
        assert (kernel_at(library, 99), kernel_at(library, 100), kernel_at(library, 513)) == (SMALL, LARGE, None)
        found = decide(rows(77, 256), transposed(rows(128, 256)), None, gpu=H200, library=library)
        assert found.config == SMALL and "interval M 1..99 of the library, measured at no less than" in found.reason
    measured = read_result(run / "result.parquet").rows
    assert len(measured) == 2 * 2 * SAMPLED and all(row["speedup"] > 1 for row in measured)
    assert json.loads((run / "run.json").read_text())["ranges"] == [
        "1:512_128_256_TN_fp16_fp32", "1:512_256_128_TN_fp16_fp32",
    ]  # fmt: skip


def test_the_report_and_the_export_name_the_interval(model: Model, tmp_path: Path) -> None:
    assert tune(tmp_path / "run", *LINEAR).exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Intervals of M" in page and "1..99" in page and "100..512" in page
    library = str(tmp_path / "run" / "library.json")
    export = ("export", "--mnk", "77_128_256", "--library", library, "--format", "cu", "--out", str(tmp_path / "out"))
    done = outblas(*export)
    assert done.exit_code == 0, done.stderr
    (text,) = [Path(line).read_text() for line in done.stdout.splitlines()]
    assert "From interval M 1..99 of the library" in text and "C[77, 128]" in text
    assert_refused(
        outblas(*export[:2], "513_128_256", *export[3:]), "is not in the h200 library", "0 problems, 2 intervals"
    )


def test_doctor_counts_the_intervals_of_the_users_library(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune(tmp_path / "run", *LINEAR, "--install").exit_code == 0
    monkeypatch.setattr("outblas.cli.checks.health.record_of_device", lambda index: type("Record", (), {"gpu": H200}))
    part = gpu_library_part(0)
    assert "own library of 0 problems and 2 intervals of M" in part.found and part.missing == ""


def test_the_same_command_goes_on_after_a_kill_and_other_ranges_are_refused(model: Model, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert tune(whole, *LINEAR).exit_code == 0
    asked = set(model.asked)
    model.asked.clear()
    model.kill_at, model.error = 27, RuntimeError("the power is gone")
    assert isinstance(tune(run, *LINEAR).exception, RuntimeError) and not (run / "library.json").exists()
    model.kill_at, model.error = 33, KeyboardInterrupt()
    stopped = tune(run, *LINEAR)
    assert stopped.exit_code == 130 and f"resuming {run}" in stopped.stderr
    model.kill_at = None
    done = tune(run, *LINEAR)
    assert done.exit_code == 0 and "with 33 measurements" in done.stderr
    assert len(model.asked) == len(set(model.asked)) and set(model.asked) == asked
    assert Library.load(run / "library.json").intervals == Library.load(whole / "library.json").intervals
    other = tune(run, *LINEAR[:2], "--m", "1:256")
    assert_refused(other, "other settings (ranges)", "another --run")


def test_a_stopped_run_says_where_its_time_went(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"gpu": PhaseTotals({"time": 0.5, "prove": 1.25}, {"kernels proved": 3})}
    monkeypatch.setattr(ModelledEvaluator, "accounts", lambda self: spent, raising=False)
    model.kill_at = 9
    assert tune(tmp_path / "run", *LINEAR).exit_code == 130
    times = json.loads((tmp_path / "run" / "times.json").read_text())
    assert times == {"gpu": {"seconds": {"prove": 1.25, "time": 0.5}, "counts": {"kernels proved": 3}}}


def test_a_time_limit_says_what_was_reached(model: Model, tmp_path: Path) -> None:
    arguments = ("tune", *LINEAR, "--device", "cuda:0", "--agent", "exhaustive", "--run", str(tmp_path / "run"))
    result = outblas(*arguments, "--budget", "4,0.000001s", "--install")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert len(model.asked) == 1 and f"time limit reached: tuned 1 of {SAMPLED} problems" in result.stderr
    assert "intervals of 1 of 1 weights are incomplete; rerun the command to continue" in result.stderr
    again = outblas(*arguments, "--budget", "4")
    assert again.exit_code == 0 and "2 intervals" in again.stdout


def test_json_counts_the_intervals(model: Model, tmp_path: Path) -> None:
    result = tune(tmp_path / "run", *LINEAR, "--json")
    document = json.loads(result.stdout)
    assert (document["intervals"], document["asked"], document["tuned"]) == (2, SAMPLED, SAMPLED)


def captured(path: Path, *products: tuple[int, int, int]) -> str:
    counts = {CapturedProduct(m, n, k, "TN", "fp16", "cuda:0", "mm"): 3 for m, n, k in products}
    CapturedProducts(counts, ({"command": "test"},)).save(path)
    return str(path)


def test_captured_weights_that_occur_with_several_m_are_tuned_as_intervals(model: Model, tmp_path: Path) -> None:
    file = captured(tmp_path / "p.json", (1, 128, 256), (37, 128, 256), (400, 128, 256), (5, 256, 128), (6, 256, 128))
    result = tune(tmp_path / "run", "--captured", file)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "tuning 1 weights for ranges of M and 2 problems of captured on cuda:0" in result.stderr
    library = Library.load(tmp_path / "run" / "library.json")
    assert {row.problem for row in library.rows} == {Problem(5, 256, 128), Problem(6, 256, 128)}
    assert [(one.first, one.last) for one in library.intervals] == [(1, 99), (100, 400)]
    assert any(problem.m == 37 for problem, _ in model.asked)
    assert "installed:" in result.stdout and "all captured matmuls 1.3" in result.stdout
    model.asked.clear()
    single = tune(tmp_path / "single", "--captured", file, "--points", "--no-install")
    assert single.exit_code == 0 and {p.m for p, _ in model.asked} == {1, 5, 6, 37, 400}
    assert Library.load(tmp_path / "single" / "library.json").intervals == ()


def test_a_suite_is_tuned_as_intervals(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Weight(n, 64).problem(m) for n in (64, 128) for m in (1, 8, 200)]
    monkeypatch.setattr("outblas.cli.common.suite_problems", lambda *_: problems)
    result = tune(tmp_path / "run", "--suite", "llm", "--intervals")
    assert result.exit_code == 0, (result.stderr, result.exception)
    library = Library.load(tmp_path / "run" / "library.json")
    assert {(one.weight, one.first, one.last) for one in library.intervals} == {
        (Weight(n, 64), *ends) for n in (64, 128) for ends in ((1, 99), (100, 200))
    }
    assert not library.rows


def test_a_recording_is_tuned_for_the_m_that_it_has(recording: str, tmp_path: Path) -> None:
    where = ("--device", f"replay:{recording}", "--agent", "random", "--budget", "4", "--run", str(tmp_path / "run"))
    result = outblas("tune", "--linear", "128_256", *where)
    assert result.exit_code == 0, (result.stderr, result.exception)
    library = Library.load(tmp_path / "run" / "library.json")
    assert library.intervals and {m for one in library.intervals for m in one.measured} <= {64, 128, 192, 256}
    missing = outblas("tune", "--linear", "9_256", *where[:-1], str(tmp_path / "other"))
    assert_refused(missing, "for weight 9_256_TN_fp16_fp32", "pass another --linear or --m")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--linear", "128_256", "--mnk", "1_2_3"), "--linear conflicts with --mnk, --captured and --sample"),
        (("--linear", "128_256", "--sample", "4"), "--linear conflicts with --mnk, --captured and --sample"),
        (("--linear", "128_256", "--captured", "p.json"), "--linear conflicts with --mnk, --captured and --sample"),
        (("--m", "1:64"), "--m needs --linear; expected a weight N_K"),
        (("--linear", "128_256", "--points"), "--points conflicts with --linear"),
        (("--intervals", "--mnk", "1_2_3"), "--intervals conflicts with --mnk and --sample"),
        (("--intervals", "--sample", "4"), "--intervals conflicts with --mnk and --sample"),
        (("--linear", "128"), "--linear '128'; expected two integers N_K"),
        (("--linear", "128_256", "--m", "9:8"), "M is 9:8; expected positive integers in ascending order"),
        (("--linear", "128_256", "--m", "0:8"), "--m '0:8'; expected the smallest and largest M, as positive integers"),
        (("--linear", "128_256", "--m", "1:1000000000"), "operand A of problem 1000000000x128x256"),
        (("--linear", "128_256", "--m", "all"), "--m 'all'; expected the smallest and largest M"),
        (("--linear", "128_256", "--dtype", "fp64"), "dtype"),
    ],
)
def test_wrong_uses_are_one_line(model: Model, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(tune(tmp_path / "run", *arguments), words)
    assert not (tmp_path / "run").exists() and not model.asked


# -- a model ---------------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 3, "vocab_size": 60, "torch_dtype": "float16", "hidden_act": "gelu",
}  # fmt: skip


def test_what_the_library_lacks_of_a_model_is_tuned_and_installed_once(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas.tune.intervals.model_ranges.gpu_of_device", lambda index: H200)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    trusted: list[Any] = []
    monkeypatch.setattr(ModelledEvaluator, "trust", lambda self, kinds: trusted.extend(kinds))
    monkeypatch.setattr(tune_run, "proved_kinds", lambda library: [library.gpu])
    result = tune(tmp_path / "run", "--model", str(file), "--engine", "vllm")
    assert trusted == ["h200"], "the packaged library's kernels were proved before"
    assert result.exit_code == 0, (result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if "times a step" in line]
    assert lines == [
        "qkv 512_256_TN_fp16_fp32, 3 times a step, with a bias: to be tuned for 47 of 51 sizes, M 1 to 496",
        "attention output 256_256_TN_fp16_fp32, 6 times a step: to be tuned for 47 of 51 sizes, M 1 to 496",
        "down 256_128_TN_fp16_fp32, 3 times a step: to be tuned for 47 of 51 sizes, M 1 to 496",
        "output head 64_256_TN_fp16_fp32, 1 times a step: to be tuned for 253 of 256 sizes, M 1 to 255",
    ], "the packaged library has M 64, 128, 256 and 512; gate and up have the shape of the attention output"
    assert "512_256_TN_fp16_fp32: 5 intervals over M 1..496, 5 with a kernel" in result.stdout
    own = Library.load(tmp_path / "data" / "outblas" / "libraries" / "h200.json")
    assert {kernel_at(own, m, Weight(512, 256)) for m in (1, 96)} == {SMALL}
    again = tune(tmp_path / "again", "--model", str(tmp_path))
    assert again.exit_code == 0 and again.stdout == ""
    assert again.stderr.count("in the library") == 4 and "nothing to tune" in again.stderr
    counts = json.loads(tune(tmp_path / "again", "--model", str(tmp_path), "--json").stdout)
    assert (counts["schema"], counts["asked"], counts["tuned"], counts["launches"]) == ("outblas-tune", 0, 0, [])
    assert counts["library"] is counts["result"] is counts["report"] is counts["installed"] is None
    assert not (tmp_path / "again").exists()


def test_a_model_is_read_where_typer_leaves_its_path_as_text(tmp_path: Path) -> None:
    """typer up to 0.28 does so in ``context.params``."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    context: Any = SimpleNamespace(params={"model": str(file), "tp": 1}, command=SimpleNamespace(params=()))
    assert model_file(context) == file
    with pytest.raises(UsageError, match="--model cannot be tuned on"):
        ranges_and_others(context, ("TN", "fp16", "fp32"), [], [], parse_device("replay:h200"))


@pytest.fixture(name="tiny")
def tiny_fixture(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a tiny model, in a working directory of the test."""
    monkeypatch.setattr("outblas.tune.intervals.model_ranges.gpu_of_device", lambda index: H200)
    monkeypatch.setattr("outblas.records.user_library.stamp_differences", lambda there, here: [])
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def test_the_same_command_goes_on_after_finished_weights_are_installed(
    model: Model, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_run, "run_tune", partial(tune_run.run_tune, clock=lambda: len(model.asked)))
    command = ("tune", "--model", tiny, "--device", "cuda:0", "--agent", "exhaustive", "--budget", "4,120s")
    whole = outblas(*command[:-1], "4", "--no-install", "--run", str(tmp_path / "whole"))
    assert whole.exit_code == 0, (whole.stderr, whole.exception)
    asked = set(model.asked)
    model.asked.clear()
    for session in range(1, 12):
        result = outblas(*command)
        assert result.exit_code == 0, (result.stderr, result.exception)
        assert ("resuming " in result.stderr) == (session > 1)
        if "are incomplete" not in result.stderr:
            break
        assert "intervals of " in result.stderr and " of 4 weights are incomplete" in result.stderr
    assert session > 2 and "in the library" in result.stderr
    assert len(model.asked) == len(set(model.asked)) and set(model.asked) == asked
    (run,) = (tmp_path / "runs").iterdir()
    own = Library.load(tmp_path / "data" / "outblas" / "libraries" / "h200.json")
    expected = Library.load(tmp_path / "whole" / "library.json").intervals
    assert Library.load(run / "library.json").intervals == expected
    assert {one.weight: one for one in own.intervals} == {one.weight: one for one in expected}
    assert "nothing to tune" in outblas(*command).stderr


def test_only_what_lacks_of_a_weight_is_tuned_and_kernels_with_pdl_stay(
    model: Model, tiny: str, tmp_path: Path
) -> None:
    model.speedups = {**model.speedups, replace(LARGE, pdl=True): lambda m: 1.6}
    done = tune(tmp_path / "linear", "--linear", "512_256", "--m", "1:480", "--install")
    assert done.exit_code == 0, (done.stderr, done.exception)
    own = tmp_path / "data" / "outblas" / "libraries" / "h200.json"
    before = Library.load(own).intervals
    assert any(one.row.pdl is not None and one.row.pdl.config.pdl for one in before)
    model.asked.clear()
    result = tune(tmp_path / "run", "--model", tiny)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert (
        "qkv 512_256_TN_fp16_fp32, 3 times a step, with a bias: to be tuned for 1 of 51 sizes, M 496 to 496"
        in result.stderr
    )
    assert {problem.m for problem, _ in model.asked if problem.n == 512} == {496}
    after = Library.load(own).interval_index.of_weight(Weight(512, 256))
    assert after[:-1] == list(before) and (after[-1].first, after[-1].last) == (496, 496)


def test_kernels_with_pdl_that_were_installed_during_a_run_stay(model: Model, tiny: str, tmp_path: Path) -> None:
    assert tune(tmp_path / "run", "--model", tiny, "--no-install").exit_code == 0
    model.speedups = {**model.speedups, replace(LARGE, pdl=True): lambda m: 1.6}
    assert tune(tmp_path / "linear", "--linear", "512_256", "--m", "8:512", "--install").exit_code == 0
    own = tmp_path / "data" / "outblas" / "libraries" / "h200.json"
    before = Library.load(own).intervals
    assert tune(tmp_path / "run", "--model", tiny).exit_code == 0
    after = Library.load(own).interval_index.of_weight(Weight(512, 256))
    assert [one for one in after if one.first >= 8] == list(before) and after[0].first == 1


def test_the_dtype_of_the_command_line_goes_before_the_models(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    result = outblas("tune", "--model", str(file), "--dtype", "bf16", "--device", "replay:h200")
    assert result.exit_code == 2 and "512_256_TN_bf16_fp32" in result.stderr
    assert "--model cannot be tuned on replay:h200" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "m", "--mnk", "1_2_3"), "--model conflicts with --mnk"),
        (("--model", "m", "--linear", "8_8"), "--model conflicts with --linear"),
        (("--model", "m", "--layout", "nn"), "--model conflicts with --layout"),
        (("--model", "m", "--engine", "tgi"), "--engine tgi"),
        (("--model", "m", "--suite", "llm"), "--suite conflicts with"),
        (("--tp", "2"), "--tp needs --model"),
        (("--engine", "vllm"), "--engine needs --model"),
        (("--model", "/no/such"), "a model's config.json"),
    ],
)
def test_options_that_do_not_go_with_a_model_are_refused(arguments: tuple[str, ...], words: str, model: Model) -> None:
    assert_refused(outblas("tune", *arguments, "--device", "cuda:0"), words)
