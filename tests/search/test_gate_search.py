"""Step ``gates`` of `outblas build-library` on a modelled GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.kernels.epilogue import STACKED_GATE
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records import provenance
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime.device import Device
from outblas.tune import tune_run
from outblas_lab.build import weight_intervals
from outblas_lab.pool.worker_plan import WorkerPlan
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL, Model, ModelledEvaluator

ENGINE = Table.parse("engine:TN:bf16:fp32")
GATE = Weight(14336, 4096, "TN", "bf16")


@pytest.fixture(name="model")
def model_fixture(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Two weights of suite engine, of which one is a gate. SMALL wins below 100 rows, LARGE from there on."""
    model = Model({SMALL: lambda m: 1.4 if m < 100 else 0.8, LARGE: lambda m: 1.2 if m < 300 else 0.9})
    monkeypatch.setattr(tune_run, "open_evaluator", lambda *_: contextlib.nullcontext(ModelledEvaluator(model)))
    monkeypatch.setattr(weight_intervals, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(weight_intervals, "make_plan", lambda kind, gpus: WorkerPlan(kind, Device(gpu_index=0), gpus))
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: None)
    sizes = [
        Problem(m, *nk, "TN", "bf16")
        for nk in ((14336, 4096), (4096, 2048))
        for m in (1, 8, 64, 96, 104, 256, 320, 512)
    ]
    monkeypatch.setattr(Table, "problems", lambda table: sizes)
    return model


def test_gates_join_the_library_and_its_products_stay(
    script: Any, work: Any, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    row = LibraryRow(GATE.problem(64), plain=LibraryChoice(LARGE, 1.1, 1.1, 1.1))
    Library("h200", (row,), {"tables": {}}).save(work.library)
    run(script, work, "gates", tables=str(ENGINE))
    library = work.load()
    assert library.rows == (row,) and library.intervals == ()
    assert {one.weight for one in library.gates} == {GATE}, "another weight is no gate"
    found = {m: choice and choice.config for m in (1, 96, 256, 512) for choice in [library.gate(GATE.problem(m))]}
    assert found == {1: SMALL, 96: SMALL, 256: LARGE, 512: None}
    about = library.provenance["gates"][str(ENGINE)]
    assert about["kernels"] == kernels_sha() and about["command"].endswith(f"--steps gates --tables {ENGINE}")
    assert "1 of 1 weights" in capsys.readouterr().out
    asked = len(model.asked)
    run(script, work, "gates", tables=str(ENGINE))
    assert len(model.asked) == asked, "a finished weight is not measured again"


def test_workers_judge_the_gate_and_have_the_librarys_product_as_a_rival(
    work: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LibraryRow(GATE.problem(64), plain=LibraryChoice(LARGE, 1.1, 1.1, 1.1))
    fallback = LibraryRow(GATE.problem(96))
    library = Library("h200", (plain, fallback), {"tables": {}})
    library.save(work.library)
    request = weight_intervals._gates_request(work, ENGINE)
    assert request.workers is not None
    judging = request.workers.judging
    assert judging.epilogue == STACKED_GATE and judging.unfused == {GATE.problem(64): LARGE}
    assert judging.baselines == RIVALS
    assert request.has_gate, "proofs of products do not count"
    assert weight_intervals._gates_request(work, Table.parse("llm:TN:bf16:fp32")).ranges.ranges == []
