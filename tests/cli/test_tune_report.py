"""``outblas tune`` writes its report, and a failed report loses nothing of the tuning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.install_hint import install_hint
from outblas.records import provenance
from outblas.records.library import Library
from outblas.runtime import device
from outblas.tune import tune_run
from outblas_lab.publish.html.page import templates
from outblas_lab.recordings.replay import ReplayEvaluator
from support.helpers import synthetic_recording

RECORDING = synthetic_recording()


class Measured(ReplayEvaluator):
    """Replay of a recording that claims to be a measurement of this machine."""

    @property
    def source(self) -> str:
        return "cuda:0"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data folder of the user of a machine with one GPU."""

    @contextmanager
    def opened(*_: object) -> Iterator[Measured]:
        yield Measured(RECORDING)

    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: None)
    monkeypatch.setattr(tune_run, "open_evaluator", opened)
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def tune(run: Path) -> Any:
    problem = RECORDING.problems[0]
    arguments = ["tune", "--mnk", problem.mnk, "--device", "cuda:0", "--agent", "random", "--budget", "4", "--install"]
    return CliRunner().invoke(app, [*arguments, "--run", str(run)])


def installed(home: Path) -> Library:
    return Library.load(home / "outblas" / "libraries" / "h200.json")


def test_the_report_names_the_library(home: Path) -> None:
    result = tune(home / "run")
    assert result.exit_code == 0 and "warning" not in result.stderr
    page = home / "run" / "report.html"
    assert f"report:  {page}" in result.stdout and "installed:" in result.stdout
    assert [row.problem for row in installed(home).rows] == [RECORDING.problems[0]]
    library = home / "run" / "library.json"
    assert library.is_file() and f"outblas.use_library(&#34;{library}&#34;)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_a_package_of_reports_tuning_ends_well_and_says_what_to_install(
    package: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    templates.cache_clear()
    result = tune(home / "run")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("report:"))
    assert f"not written: {package} is not installed" in line and install_hint("report") in line
    assert line.endswith(f"outblas report {home / 'run'}") and not (home / "run" / "report.html").exists()
    assert [row.problem for row in installed(home).rows] == [RECORDING.problems[0]]


def test_a_report_that_cannot_be_written_costs_the_report_alone(home: Path) -> None:
    page, library = home / "run" / "report.html", home / "outblas" / "libraries" / "h200.json"
    assert tune(home / "run").exit_code == 0
    library.unlink()
    page.unlink()
    page.mkdir()  # in its way
    result = tune(home / "run")
    assert result.exit_code == 2 and "report.html" in result.stderr, result.output
    assert [row.problem for row in installed(home).rows] == [RECORDING.problems[0]]
