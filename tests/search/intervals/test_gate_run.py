"""The gates of ``outblas tune --model`` on a modelled GPU."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outblas.core.weight import Weight
from outblas.kernels.epilogue import STACKED_GATE
from outblas.records import provenance
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas.runtime import device
from outblas.tune import gate_run, tune_run
from outblas.tune.gate_run import surely_faster
from support.cli_fixture import outblas
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL, Model, ModelledEvaluator

CONFIG = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 3, "vocab_size": 60, "torch_dtype": "float16", "hidden_act": "silu",
}  # fmt: skip
GATE = Weight(640, 256)


@pytest.fixture(name="plans")
def plans_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workers of each run on a fake GPU; and a model's file in the working directory."""
    model, plans = Model({SMALL: lambda m: 1.4 if m < 100 else 0.8, LARGE: lambda m: 1.2}), list[Any]()

    def opened(where: Any, recording: Any, workers: Any) -> Any:
        plans.append(workers)
        return contextlib.nullcontext(ModelledEvaluator(model))

    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: None)
    monkeypatch.setattr(tune_run, "open_evaluator", opened)
    monkeypatch.setattr("outblas.tune.intervals.model_ranges.gpu_of_device", lambda index: H200)
    monkeypatch.setattr("outblas.records.user_library.stamp_differences", lambda there, here: [])
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    return plans


def tune(*more: str) -> Any:
    command = ("tune", "--model", "config.json", "--device", "cuda:0", "--agent", "exhaustive", "--budget")
    return outblas(*command, *(more or ("4",)))


def test_gates_are_tuned_after_the_products_and_installed_once(plans: list[Any], tmp_path: Path) -> None:
    result = tune("4", "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert document["gates"] == 2 and document["asked"] > 100
    own = Library.load(tmp_path / "data" / "outblas" / "libraries" / "h200.json")
    assert {one.weight for one in own.gates} == {GATE} and len({one.weight for one in own.intervals}) > 3
    found = {m: choice and choice.config for m in (1, 96, 256) for choice in [own.gate(GATE.problem(m))]}
    assert found == {1: SMALL, 96: SMALL, 256: LARGE}
    products, gates = plans
    assert products is None and gates.judging.epilogue == STACKED_GATE
    assert gates.judging.unfused[GATE.problem(1)] == SMALL, "the kernel that was just installed is a rival"
    again = tune("4", "--json")
    assert "nothing to tune" in again.stderr and len(plans) == 2
    assert json.loads(again.stdout)["gates"] == 0


def test_gates_alone_are_tuned_where_the_library_has_the_products(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gate_run, "lacking_gates", lambda weights, library: tune_run.RangesRequest())
        assert tune().exit_code == 0
    result = tune()
    assert result.exit_code == 0 and f"gates of {GATE.key}: 2 intervals, 2 with a kernel" in result.stderr
    assert "nothing to tune" not in result.stderr and result.stdout == ""


def test_without_time_the_gates_wait_for_the_next_command(plans: list[Any]) -> None:
    assert tune("4,0.000001s").exit_code == 0
    assert len(plans) == 1
    assert "time limit reached before the gates" in tune("4,0.000001s").stderr


def test_a_search_that_was_stopped_installs_nothing_and_goes_on(
    plans: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gate_run, "lacking_gates", lambda weights, library: tune_run.RangesRequest())
        assert tune("4,60s").exit_code == 0
    own = tmp_path / "data" / "outblas" / "libraries" / "h200.json"
    asked: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(gate_run, "run_tune", partial(tune_run.run_tune, clock=lambda: asked.append(1) or len(asked)))
        stopped = tune("4,60s")
    assert "time limit reached during the gates" in stopped.stderr and Library.load(own).gates == ()
    result = tune("4,60s")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert {one.weight for one in Library.load(own).gates} == {GATE}
    (folder,) = (tmp_path / "runs").glob("*_gates_*")
    assert Library.load(folder / "library.json").gates == Library.load(own).gates
    assert json.loads((folder / "run.json").read_text())["suite"] == "gates"


def test_a_kernel_that_may_be_slower_than_a_product_and_a_pass_is_left_out() -> None:
    row = LibraryRow(GATE.problem(1), plain=LibraryChoice(SMALL, 1.02, 1.01, 1.03))
    level = replace(row, problem=GATE.problem(9), plain=LibraryChoice(LARGE, 1.01, 0.995, 1.02))
    found = surely_faster([LibraryInterval(row, 8, (1, 8)), LibraryInterval(level, 16, (9, 16))])
    assert [one.row.plain and one.row.plain.config for one in found] == [SMALL, None]
    assert [(one.first, one.last) for one in found] == [(1, 8), (9, 16)]


def test_a_model_with_another_activation_has_no_gates(plans: list[Any]) -> None:
    Path("config.json").write_text(json.dumps({**CONFIG, "hidden_act": "gelu_pytorch_tanh"}))
    assert tune().exit_code == 0 and len(plans) == 1
