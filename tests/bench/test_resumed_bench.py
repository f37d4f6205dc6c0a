"""A bench that was stopped and goes on: its file names the origin of all its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import Result, read_result
from outblas_lab.pool import run_bench
from support.fake_gpu import FakeGpu, install

FIRST, SECOND = Problem(64, 128, 256), Problem(128, 128, 256)
CHOICE = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.2, 1.1, 1.3)
LIBRARY = Library("h200", tuple(LibraryRow(p, "lt_auto", "", "cuda:0", CHOICE) for p in (FIRST, SECOND)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, run_bench)


def bench(out: Path, **settings: Any) -> Result:
    request = run_bench.BenchRequest((FIRST, SECOND), "grid1000", LIBRARY, out, **settings)
    return read_result(run_bench.run_bench(request))


def stopped(gpu: FakeGpu, out: Path, **settings: Any) -> None:
    """A bench that ends at the second problem; the next one can finish it."""
    gpu.interrupt[SECOND] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        bench(out, **settings)
    gpu.interrupt.clear()


@pytest.mark.parametrize("changed", [{"driver": "2"}, {"toolchain": {"cublas": "2"}}, {"gpu": "another"}])
def test_figures_of_two_drivers_or_toolchains_are_not_mixed(
    changed: dict[str, Any], gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"gpu": "a GPU", "driver": "1", "toolchain": {"cublas": "1"}}
    monkeypatch.setattr(run_bench, "shared_conditions", lambda index: here)
    stopped(gpu, tmp_path / "out.parquet")
    monkeypatch.setattr(run_bench, "shared_conditions", lambda index: {**here, **changed})
    with pytest.raises(UsageError, match="other settings"):
        bench(tmp_path / "out.parquet")


def begin_in(monkeypatch: pytest.MonkeyPatch, commit: str, machine: str) -> None:
    monkeypatch.setattr(run_bench, "source_commit", lambda: commit)
    monkeypatch.setattr(run_bench, "start_of_machine", lambda: machine)


def test_a_bench_of_two_commits_and_starts_names_both(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_in(monkeypatch, "a" * 40, "first")
    stopped(gpu, tmp_path / "out.parquet")
    begin_in(monkeypatch, "b" * 40, "second")
    made = bench(tmp_path / "out.parquet").provenance
    assert (made["commit"], made["machine"]) == (f"{'a' * 40}; {'b' * 40}", "first; second")


def test_a_bench_of_one_start_does_not_go_on_in_another(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_in(monkeypatch, "a" * 40, "first")
    stopped(gpu, tmp_path / "judge.parquet", one_start=True)
    begin_in(monkeypatch, "a" * 40, "second")
    with pytest.raises(UsageError, match="other settings"):
        bench(tmp_path / "judge.parquet", one_start=True)
    begin_in(monkeypatch, "a" * 40, "first")
    assert bench(tmp_path / "judge.parquet", one_start=True).provenance["machine"] == "first"
