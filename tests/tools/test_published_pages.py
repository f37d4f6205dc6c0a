"""tools/published_pages.py: it says which files it wrote or which are stale, and runs without any setup."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError
from support.bench_fixture import write_bench
from support.helpers import ROOT, SOURCE_PATH, module_of_file


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module_of_file(ROOT / "tools" / "published_pages.py", monkeypatch)


@pytest.mark.parametrize("stale", [[], ["README.md is stale"]])
def test_a_check_says_its_outcome(
    stale: list[str], script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "check_published", lambda folder: stale)
    assert script.main(["--check"]) == (2 if stale else 0)
    shown = capsys.readouterr()
    assert ("checked: " in shown.out) == (not stale) and all(f"error: {line}\n" in shown.err for line in stale)


def test_an_error_is_one_line(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(folder: Path) -> list[str]:
        raise RecordError("no file", "one", "measure")

    monkeypatch.setattr(script, "check_published", refuse)
    assert script.main(["--check"]) == 2
    assert capsys.readouterr().err == "error: no file; expected one; measure\n"


def test_it_finds_its_modules_without_a_search_path(tmp_path: Path) -> None:
    write_bench(tmp_path / "results" / "h200" / "grid.parquet")
    command = [sys.executable, str(ROOT / "tools" / "published_pages.py")]
    for option, code, words in (("--check", 2, "is missing"), ("--write", 0, "written: "), ("--check", 0, "checked: ")):
        done = subprocess.run(
            [*command, option],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SOURCE_PATH},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and words in done.stdout + done.stderr, done.stderr
