"""``outblas contribute`` packs what a fake GPU tuned, and ``build-library --check`` verifies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.judge.bench_cell import Options
from outblas.records.contribution import load_contribution
from outblas.runtime import device
from outblas.tune import live_evaluator
from support.cli_fixture import assert_refused, outblas
from support.fake_gpu import FakeGpu
from support.gpus.fake_driver import DEVICES, plug_in
from support.json_output import document


@pytest.fixture(name="tuned")
def tuned_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The run directory of a tuning run on a fake A100, whose library is installed."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    plug_in(monkeypatch, DEVICES["A100"])
    state = FakeGpu()

    def open_live(index: int = 0, options: Any = None, **_: Any) -> Any:
        return state.evaluator(index, options or Options(index, device.gpu_of_device(index)))

    monkeypatch.setattr(live_evaluator, "LiveEvaluator", open_live)
    run = tmp_path / "run"
    done = outblas(
        "tune", "--mnk", "64_4096_4096", "--budget", "4", "--install", "--device", "cuda:0", "--run", str(run)
    )
    assert done.exit_code == 0, (done.stderr, done.exception)
    return run


def test_what_is_packed_passes_the_check(tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "a100.outblas.zip"
    done = outblas("contribute", "--run", str(tuned), "--out", str(target))
    assert done.exit_code == 0 and "note:" not in done.stderr, (done.stderr, done.exception)
    assert f"outblas build-library --check {target}" in done.stdout
    checked = outblas("build-library", "--check", str(target))
    assert checked.exit_code == 0, checked.stderr
    assert checked.stdout.startswith("NVIDIA A100-SXM4-80GB: 1 problems, record a100-sxm4-80gb")
    packed = document("contribute", "--run", str(tuned), "--out", str(target), "--json")
    assert packed["files"] == {"contribution": str(target)} and packed["facts"]["faults"] == []
    assert document("build-library", "--check", str(target), "--json")["facts"] == {"problems": 1, "faults": []}


def test_only_a_contribution_is_replaced(tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "a100.outblas.zip"
    target.write_bytes(b"PK\x03\x04 of somebody else")
    assert_refused(outblas("contribute", "--out", str(target)), "exists but is not a contribution")
    target.unlink()
    assert [outblas("contribute", "--out", str(target)).exit_code for _ in range(2)] == [0, 0]


def test_nothing_about_the_machine_is_packed(tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "a100.outblas.zip"
    outblas("contribute", "--run", str(tuned), "--out", str(target))
    found = load_contribution(target)
    assert found.library.provenance == {} and "command" not in found.provenance


def test_kernels_without_a_recorded_proof_are_a_fault(tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "a100.outblas.zip"
    done = outblas("contribute", "--out", str(target))
    assert done.exit_code == 0 and "has no recorded proof" in done.stderr
    checked = outblas("build-library", "--check", str(target))
    assert checked.exit_code == 2 and "fault: " in checked.stderr


def test_without_a_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    plug_in(monkeypatch, DEVICES["A10"])
    assert_refused(outblas("contribute"), "no user library for a10 is installed", "outblas tune")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04")
    assert_refused(outblas("build-library", "--check", str(tmp_path / "x.zip")), "is damaged", "outblas contribute")
