"""The command line in this process, and what a refusal looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.runtime import device
from support.helpers import synthetic_recording


def outblas(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def assert_refused(result: Any, *words: str) -> None:
    """Assert exit status 2, one line on stderr with every word, nothing on stdout, and no traceback."""
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert result.stdout == ""


def refused(result: Any) -> str:
    """Return the line of a refusal, which has the three parts of an error."""
    assert_refused(result)
    line = str(result.stderr).strip()
    assert line.count("; ") >= 2 and "; expected " in line, line
    return line


@pytest.fixture(name="two_gpus")
def two_gpus_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 2)


@pytest.fixture(name="recording")
def recording_fixture(tmp_path: Path) -> str:
    return str(synthetic_recording().write(tmp_path / "recording"))
