"""``outblas export-t4`` and ``import-t4``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.config import config_name
from outblas.records.evaluation_json import evaluation_from_json
from outblas_lab.kernel_tuner.t4_files import task_of
from support.cli_fixture import assert_refused
from support.helpers import synthetic_problems, synthetic_recording

PROBLEM = synthetic_problems()[1]


def outblas(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def device(tmp_path: Path) -> str:
    return f"replay:{synthetic_recording().write(tmp_path / 'recording')}"


@pytest.mark.parametrize("cache", [[], ["--cache"]])
def test_what_is_exported_is_imported(device: str, cache: list[str], tmp_path: Path) -> None:
    file, lines = str(tmp_path / "file.json"), tmp_path / "evaluations.jsonl"
    result = outblas("export-t4", "--mnk", PROBLEM.mnk, "--launch", "pdl", "--device", device, "--out", file, *cache)
    assert result.exit_code == 0, result.stderr
    assert ("cache" in json.loads(Path(file).read_text())) == bool(cache)
    result = outblas("import-t4", file, "--to", str(lines), "--device", device)
    assert result.exit_code == 0, result.stderr
    task = task_of(synthetic_recording(), PROBLEM, "pdl")
    config, us = task.best()  # type: ignore[misc]
    count = len(task.cells)
    assert f"{count} configs of {PROBLEM.key}, pdl" in result.stdout and f"{us:.3f} us" in result.stdout
    assert config_name(config) in result.stdout and "100.0%" in result.stdout
    assert f"{count} identical measurements, of {count}" in result.stdout
    read = [evaluation_from_json(json.loads(line)) for line in lines.read_text().splitlines()]
    assert read == task.evaluations()


@pytest.mark.parametrize("cache", [[], ["--cache"]])
def test_another_kind_than_the_file_names_is_refused(device: str, cache: list[str], tmp_path: Path) -> None:
    file, key = str(tmp_path / "file.json"), PROBLEM.key
    done = outblas("export-t4", "--mnk", PROBLEM.mnk, "--launch", "pdl", "--device", device, "--out", file, *cache)
    assert done.exit_code == 0
    for option, wrong, right in (("--layout", "nn", "tn"), ("--dtype", "bf16", "fp16"), ("--acc", "fp16", "fp32")):
        assert_refused(
            outblas("import-t4", file, option, wrong),
            f"{option} {wrong} contradicts the file",
            f"{right}, as in {key}",
        )
        assert outblas("import-t4", file, option, right).exit_code == 0


def test_bad_input_is_one_line(device: str, tmp_path: Path) -> None:
    out = str(tmp_path / "file.json")
    for arguments, word in (
        (["export-t4", "--mnk", PROBLEM.mnk, "--launch", "fast", "--out", out], "fast"),
        (["export-t4", "--mnk", "8_8_8", "--device", device, "--out", out], "not in the recording"),
        (["export-t4", "--mnk", PROBLEM.mnk, "--device", "replay:/nowhere", "--out", out], "does not exist"),
        (["export-t4", "--mnk", PROBLEM.mnk, "--device", device, "--launch", "weights", "--out", out], "weights"),
        (["import-t4", str(tmp_path / "absent.json")], "absent.json"),
        (["import-t4", str(tmp_path)], "cannot be read"),
    ):
        result = outblas(*arguments)
        assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1 and word in result.stderr
        assert not Path(out).exists()
