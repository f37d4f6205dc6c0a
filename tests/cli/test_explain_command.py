"""``outblas explain``: who computes a model's products at which speed-up, from the packaged library alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outblas.cli import explain
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice
from outblas.runtime import device
from outblas.tune.intervals.model_ranges import ProductWay, served, step_speedup
from support.cli_fixture import assert_refused, outblas
from support.gpus.known import H200

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_each_product_has_its_way_and_a_step_its_gain(file: str) -> None:
    result = outblas("explain", "--model", file, "--rows", "1,4096", "--device", "replay:h200")
    assert result.exit_code == 0, (result.stderr, result.exception)
    lines = result.stdout.splitlines()
    row = Library.packaged("h200").lookup(Problem(1, 4096, 14336))
    assert row is not None and row.plain is not None
    (down,) = [line for line in lines if line.startswith("down 4096_14336_TN_fp16_fp32 (32 times): ")]
    assert f"M 1: kernel {row.plain.speedup:.3f}" in down and "M 4096: " in down
    assert sum(line.startswith("matmuls of a step with M = ") for line in lines) == 2
    assert lines[-1] == f"to tune the missing sizes on a GPU: outblas tune --model {file} --tp 1"
    assert result.stderr == "library: h200\n"


def test_without_a_gpu_it_names_the_library(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    result = outblas("explain", "--model", file, "--rows", "1")
    assert result.stderr == "library: h200 (no GPU here; --device names another)\n"


def test_a_gate_is_a_kernel_where_one_was_measured_to_be_faster(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.25, 1.2, 1.3)
    monkeypatch.setattr(Library, "gate", lambda self, problem: choice if problem.m == 8 else None)
    result = outblas("explain", "--model", file, "--rows", "8,8192", "--dtype", "bf16", "--device", "replay:h200")
    assert result.exit_code == 0
    line = "  with fused SiLU gate: M 8: kernel 1.250, M 8192: separate pass"
    assert line in result.stdout.splitlines()


def test_an_excluded_kernel_is_not_promised(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.25, 1.2, 1.3)
    monkeypatch.setattr(Library, "gate", lambda self, problem: choice)
    monkeypatch.setenv("OUTBLAS_EXCLUDE", "8_*_*,sm90_wgmma_gemm")
    result = outblas("explain", "--model", file, "--rows", "8", "--dtype", "bf16", "--device", "replay:h200")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "  with fused SiLU gate: M 8: separate pass" in lines
    assert all(": M 8: torch 1.000" in line for line in lines if " times): " in line)
    assert "matmuls of a step with M = 8: predicted speedup 1.000x" in lines
    row = Library.packaged("h200").lookup(Problem(1, 4096, 14336))
    assert row is not None and row.plain is not None
    asked = Problem(9, 512, 512), H200, Library("h200", ()), lambda *_: row.plain
    monkeypatch.setenv("OUTBLAS_EXCLUDE", row.plain.config.family)
    assert served(*asked).by == "torch"


def test_the_command_that_tunes_is_for_a_shell_and_has_the_same_options(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"intermediate_size": 14464}))  # of no library
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(explain, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr("outblas.tune.intervals.model_ranges.gpu_of_device", lambda index: H200)
    result = outblas("explain", "--model", str(folder), "--dtype", "bf16", "--tp", "2", "--device", "cuda:0")
    assert result.exit_code == 0, (result.stderr, result.exception)
    command = f"outblas tune --model '{folder}' --tp 2 --dtype bf16 --device cuda:0"
    assert result.stdout.splitlines()[-1] == f"to tune the missing sizes: {command}"


def test_what_no_library_has_is_predicted_or_torchs() -> None:
    problem, empty = Problem(8, 512, 512), Library("h200", ())
    assert served(problem, H200, empty, None)[:2] == ("torch", 1.0)
    assert served(problem, H200, empty, lambda *_: None)[:2] == ("torch", 1.0)
    row = Library.packaged("h200").lookup(Problem(1, 4096, 14336))
    assert row is not None
    assert served(problem, H200, empty, lambda *_: row.plain)[0] == "predicted"


def test_the_gain_of_a_step_is_by_time() -> None:
    """3 us at 2 times the speed, twice, and 6 us as before: 18 of 12."""
    assert step_speedup([(2, ProductWay("kernel", 2.0, 3.0)), (1, ProductWay("torch", 1.0, 6.0))]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--rows", "0"), "--rows '0'"), (("--rows", "a"), "--rows 'a'"), (("--engine", "x"), "--engine x")],
)
def test_wrong_options_are_one_line(file: str, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(outblas("explain", "--model", file, *arguments, "--device", "replay:h200"), words)
