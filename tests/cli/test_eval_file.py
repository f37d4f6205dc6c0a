"""``outblas eval --file`` and what doctor says of free kernels."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outblas.cli.checks import health
from outblas.cli.main import app
from outblas.core.errors import ToolchainMissing
from outblas.records.evaluation_json import evaluation_from_json
from outblas.runtime import device
from outblas_lab.custom.free_kernel import FreeKernel
from support.free_fixture import BODY, device_text, missing

compiles = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_count", lambda: 0)


def evaluate(path, *more):
    given = ["eval", "--file", str(path), "--mnk", "64_64_64", "--base-dir", str(path.parent), *more]
    return CliRunner().invoke(app, given, env={"COLUMNS": "200"})


@compiles
def test_without_a_gpu_a_file_is_compiled_only_and_what_was_seen_is_written(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(device_text())
    result = evaluate(path)
    assert result.exit_code == 0, result.output
    assert "compiled; not run" in result.stdout and "registers:" in result.stdout and "compile:h200" in result.stdout
    (written,) = tmp_path.glob("eval_64_64_64_TN_fp16_fp32_free_*.json")
    found = evaluation_from_json(json.loads(written.read_text()))
    assert found.config == FreeKernel.parse(device_text())


@compiles
def test_a_file_that_does_not_compile_is_told_the_compilers_words_and_exits_with_2(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(device_text(BODY.replace("float sum", "flot sum")))
    result = evaluate(path)
    assert result.exit_code == 2 and "compile_error" in result.stdout and '"flot" is undefined' in result.stdout


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        (None, (), "No such file"),
        (b"int x;", (), "launch blocks"),
        (b"\xff\xfe", (), "UTF-8"),
        (device_text().encode(), ("--mode", "server", "--target-qps", "10"), "mode"),
    ],
)
def test_bad_input_is_one_line(tmp_path, data, more, words):
    path = tmp_path / "kernel.cu"
    if data is not None:
        path.write_bytes(data)
    result = evaluate(path, *more)
    assert result.exit_code == 2 and result.stdout == ""
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("*.json"))


def test_doctor_says_what_is_missing_for_free_kernels_and_what_the_jail_holds(monkeypatch):
    checks = {check.name: check for check in health.diagnose()}
    assert {"nvcc", "cutlass", "jail"} <= set(checks)
    assert "environment" in checks["jail"].found and len(checks["jail"].found) < 250
    assert "not covered: older threads" in checks["jail"].found

    def missing():
        raise ToolchainMissing("none", "one", "pip install './lab[free]'")

    monkeypatch.setattr("outblas_lab.jail.toolchain.find_nvcc", missing)
    monkeypatch.setattr("outblas_lab.jail.toolchain.locate_cutlass", missing)
    monkeypatch.setattr("outblas_lab.jail.landlock.abi", lambda: 0)
    checks = {check.name: check for check in health.diagnose()}
    for name in ("nvcc", "cutlass"):
        assert checks[name].ok is None and "./lab[free]" in checks[name].do
    assert checks["jail"].ok is None and "container" in checks["jail"].do
