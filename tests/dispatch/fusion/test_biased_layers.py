"""``torch.nn.Linear`` with a bias under ``outblas.enable()``: one kernel in a graph, torch's operations elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="layers are of torch")

import torch
from torch import nn

import outblas
from outblas.dispatch import enable
from outblas.dispatch import linear as linear_module
from outblas.dispatch.biased_layers import BiasedLayers
from outblas.dispatch.enable import Switch
from outblas.dispatch.fusion import fused
from support.fused_fixture import host_fixture
from support.served_fixture import served_fixture

__all__ = ["host_fixture", "served_fixture"]

TORCHS = nn.Linear.forward


@pytest.fixture
def layer(host: fused.FusedState) -> Any:
    """A layer whose kernel is loaded, and whose parameters want no gradient."""
    made = nn.Linear(16, 24).half().requires_grad_(False)
    assert outblas.warm(torch.ones(5, 16).half(), made.weight, made.bias)
    return made


@pytest.fixture
def layers(layer: Any) -> Iterator[BiasedLayers]:
    made = BiasedLayers()
    made.install()
    yield made
    made.remove()
    assert nn.Linear.forward is TORCHS


@pytest.fixture
def capturing(host: fused.FusedState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


X = torch.linspace(-1, 1, 80).view(5, 16).half()


def by_torch(layer: Any, x: torch.Tensor = X) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def test_an_eager_layer_is_torchs(layer: Any, layers: BiasedLayers, host: fused.FusedState) -> None:
    launched = host.launched
    assert torch.equal(layer(X), by_torch(layer)) and host.launched == launched and layers.ours == 0


@pytest.mark.parametrize("shape", [(5, 16), (1, 5, 16)])
def test_a_captured_layer_is_one_kernel(
    shape: tuple[int, ...], layer: Any, layers: BiasedLayers, capturing: None, host: fused.FusedState
) -> None:
    launched, x = host.launched, X.view(shape)
    found = layer(x)
    assert found.shape == (*shape[:-1], 24) and torch.allclose(found, by_torch(layer, x), atol=1e-3)
    assert host.launched == launched + 1 and layers.ours == 1


def test_what_no_kernel_computes_is_torchs(
    layer: Any, layers: BiasedLayers, capturing: None, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = host.launched
    odd = nn.Linear(16, 24).half().requires_grad_(False)
    odd.bias = nn.Parameter(torch.ones(1).half(), requires_grad=False)
    without = nn.Linear(16, 24, bias=False).half().requires_grad_(False)
    single = nn.Linear(16, 24).requires_grad_(False)
    assert torch.equal(odd(X), by_torch(odd)) and torch.equal(without(X), by_torch(without))
    assert torch.equal(single(X.float()), by_torch(single, X.float()))
    wanted = X.clone().requires_grad_()
    layer(wanted).sum().backward()
    assert wanted.grad is not None
    monkeypatch.setenv(linear_module.FUSED_VARIABLE, "0")
    assert torch.equal(layer(X), by_torch(layer))
    assert host.launched == launched and layers.ours == 0


def test_errors_are_torchs(layer: Any, layers: BiasedLayers, capturing: None) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        layer(torch.ones(5, 8).half())
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(X.float())


def test_the_method_is_compiled_as_torchs(layers: BiasedLayers, capturing: None) -> None:
    made = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8, bias=False)).requires_grad_(False)
    x = torch.ones(5, 16)
    expected = made(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(torch.jit.script(made)(x), expected)
    assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), expected)
    targets = [node.target for node in torch.export.export(made, (x,)).graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.linear.default] * 2


def test_the_method_of_another_package_stays(layer: Any, capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = BiasedLayers()
    made.install()
    ours = nn.Linear.forward
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, input: ours(self, input) + 1)
        made.remove()
        assert torch.equal(layer(X), by_torch(layer) + 1) and made.ours == 0
        made.install()
        layer(X)
        assert made.ours == 1
    made.remove()
    assert nn.Linear.forward is TORCHS


def test_outblas_linear_follows_the_same_rule(
    layer: Any, capturing: None, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = host.launched
    outblas.linear(X, layer.weight, layer.bias)
    assert host.launched == launched + 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    outblas.linear(X, layer.weight, layer.bias)
    assert host.launched == launched + 1


def test_enable_installs_it_and_counts(layer: Any, capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    switch = Switch("CPU", lambda guarantee: "")
    monkeypatch.setattr(enable, "_switch", switch)
    with outblas.use():
        layer(X)
        assert switch.status()["ours"] == 1 and nn.Linear.forward is not TORCHS
    assert nn.Linear.forward is TORCHS
