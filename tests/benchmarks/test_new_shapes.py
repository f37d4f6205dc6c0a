"""The shapes of benchmarks/new_shapes.py: in no suite, the same every time."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.files import lock_folder
from outblas.core.suites import suite


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("new_shapes")


def test_shapes_are_in_no_suite_and_no_extent_is_a_multiple_of_64(script: Any) -> None:
    drawn = script.shapes(40, 0)
    assert len(set(drawn)) == 40 and drawn == script.shapes(40, 0) != script.shapes(40, 1)
    assert all(extent % 64 for p in drawn for extent in (p.m, p.n, p.k))
    assert not set(drawn) & {*suite("grid1000"), *suite("llm")}
    assert min(p.m for p in drawn) < 256 and max(p.m for p in drawn) > 4096, "log-uniform over the grid's range"


def test_what_needs_a_promise_is_not_searched(script: Any) -> None:
    assert script.OPTIONS == ("plain", "pdl")


@pytest.mark.parametrize("name", ["new_shapes", "any_shapes"])
def test_two_searches_do_not_share_a_directory(name: str, script: Any, tmp_path: Path) -> None:
    any_shapes = ["-m", "outblas", "fit", "any-shape", "fit"]
    program = any_shapes if name == "any_shapes" else [script.__file__]
    with lock_folder(tmp_path):
        run = [sys.executable, *program, "--work", str(tmp_path)]
        done = subprocess.run(run, capture_output=True, text=True)
    assert (
        done.returncode == (2 if name == "any_shapes" else 1)
        and f"{tmp_path} is in use by another process" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
