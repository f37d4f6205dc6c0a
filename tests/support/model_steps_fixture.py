"""A tiny model of examples/llama.py on a CPU, the benchmark of its steps, and a device that serves CPU tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the example is of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")


from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import enable, fused  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.helpers import ROOT  # noqa: E402
from support.served_fixture import ANY, Everything, Served, served_fixture  # noqa: F401  # noqa: E402

LAYERS = 2
#: Linear layers of the tiny model: QKV, O, gate and up, down; the head.
PRODUCTS = 4 * LAYERS + 1
#: N_K of a layer's products -> how many of a step have it.
LAYERS_OF_EACH = dict.fromkeys(("128_64", "64_64", "192_64", "64_96"), LAYERS)
#: Those that two sums and a gate of a layer follow.
FOLLOWED = 3 * LAYERS
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.fixture(name="code")
def code_fixture(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the benchmark, and the example that they run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "transformer"))
    names = ("model_explained", "model_greedy", "model_runs", "model_steps", "model_tune", "step_rounds")
    modules = {name: importlib.import_module(name) for name in names}
    return SimpleNamespace(**modules, llama=importlib.import_module("llama_example").llama)


@pytest.fixture(name="model")
def model_fixture(code: SimpleNamespace) -> Any:
    return code.llama.random_model(code.llama.llama3_8b(LAYERS, **TINY), "cpu")


def at_once(do: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Stand in for the queue in the background: do a task before the call returns."""
    done = Future[Any]()
    try:
        done.set_result(do(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done


@pytest.fixture(name="ours")
def ours_fixture(served: Served, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """``outblas.use()`` is of the CPU, every launch option has a kernel, and every one can be fused at once."""

    def lookup(_library: Any, problem: Problem) -> LibraryRow:
        return LibraryRow(
            problem, "lt_auto", plain=LibraryChoice(ANY, 1.2, 1.1, 1.3), pdl=LibraryChoice(ANY, 1.2, 1.1, 1.3)
        )

    monkeypatch.setattr(Everything, "lookup", lookup)
    made = Switch("CPU", lambda guarantee: "")
    monkeypatch.setattr(enable, "_switch", made)
    monkeypatch.setattr(host.kernels, "_submit", at_once)
    yield served
    assert not made.on, "what was switched on is off again"
