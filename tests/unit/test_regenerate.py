"""scripts/regenerate.py from end to end on a fake GPU: what it leaves is what the readers accept."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fake_gpu import install
from outblas import bench, record
from outblas.library import Library
from outblas.problem import Problem
from outblas.recording import Recording
from outblas.results import read_result

ROOT = Path(__file__).parents[2]
PROBLEMS = [Problem(64 * m, 128, 512) for m in (1, 2, 4, 8)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("regenerate", ROOT / "scripts" / "regenerate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for target in (bench, record, module):
        install(monkeypatch, target)
    monkeypatch.setattr(module, "suite", lambda name: list(PROBLEMS))
    return module


def test_every_step_leaves_files_that_load(script: Any, tmp_path: Path) -> None:
    for step in script.DEFAULT_STEPS.values():
        step(tmp_path, 0)
    assert list(Recording.load(tmp_path / "recording").problems) == PROBLEMS
    library = Library.load(tmp_path / "library.json")
    assert [row.problem for row in library.rows] == PROBLEMS
    assert library.provenance["gpu"]
    result = read_result(tmp_path / f"{script.STEM}_offline.parquet")
    assert len(result.rows) == 2 * len(PROBLEMS)
    assert not any(row["fallback"] for row in result.rows)


def test_a_kernel_that_does_not_win_again_is_not_kept(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.record(tmp_path, 0)
    script.tune_recorded(tmp_path, 0)
    monkeypatch.setattr(script, "CONFIRM_BELOW", 1e9)  # everything is doubtful
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 3.95)  # low bound below 1 from now on
    script.confirm(tmp_path, 0)
    library = Library.load(tmp_path / "library.json")
    assert library.fallbacks(pdl=False) == library.fallbacks(pdl=True) == len(PROBLEMS)


def test_a_kernel_behind_in_the_bench_is_demoted_and_the_next_bench_falls_back(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in script.DEFAULT_STEPS.values():
        step(tmp_path, 0)
    (tmp_path / f"{script.STEM}_offline.parquet").unlink()
    monkeypatch.setattr("fake_gpu.time_us", lambda problem, config: 3.95)
    script.bench(tmp_path, 0)
    script.demote(tmp_path, 0)
    script.bench(tmp_path, 0)
    assert all(row["fallback"] for row in read_result(tmp_path / f"{script.STEM}_offline.parquet").rows)
    assert (tmp_path / f"{script.STEM}_offline_1.parquet").exists()  # the losing bench is kept
