"""``torch.nn.Linear`` with a bias under ``outblas.enable()``: one kernel in a graph, torch's operations elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="layers are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch import enable, fused  # noqa: E402
from outblas.dispatch.biased_layers import BiasedLayers  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from outblas.dispatch.fused_layer import FUSED_VARIABLE  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: E402
from support.served_fixture import served_fixture  # noqa: E402

__all__ = ["host_fixture", "served_fixture"]

TORCHS = nn.Linear.forward


@pytest.fixture
def layer(host: fused.FusedState) -> Any:
    """A layer whose kernel is loaded, and whose parameters want no gradient."""
    made = nn.Linear(16, 24).half().requires_grad_(False)
    assert outblas.warm(torch.ones(5, 16).half(), made.weight, made.bias)
    return made


@pytest.fixture
def layers(layer: Any, graph: Any) -> Iterator[BiasedLayers]:
    made = BiasedLayers()
    made.install()
    yield made
    made.remove()
    assert nn.Linear.forward is TORCHS and torch.cuda.CUDAGraph is graph and graph.capture_begin is BEGIN


class Graph:
    """A graph whose capture is a flag."""

    capturing = False

    def capture_begin(self, pool: Any = None) -> None:
        Graph.capturing = True

    def capture_end(self) -> None:
        Graph.capturing = False


BEGIN = Graph.capture_begin


@pytest.fixture(name="graph")
def graph_fixture(host: fused.FusedState, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of graphs, in place of torch's; a CPU has none."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "capturing", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.capturing)
    return Graph


@contextlib.contextmanager
def captured() -> Iterator[None]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=None)
    try:
        yield
    finally:
        graph.capture_end()


X = torch.linspace(-1, 1, 80).view(5, 16).half()


def by_torch(layer: Any, x: torch.Tensor = X) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def test_an_eager_layer_is_torchs(layer: Any, layers: BiasedLayers, host: fused.FusedState) -> None:
    launched = host.launched
    assert nn.Linear.forward is TORCHS, "it costs nothing"
    assert torch.equal(layer(X), by_torch(layer)) and host.launched == launched and layers.ours == 0


@pytest.mark.parametrize("shape", [(5, 16), (1, 5, 16)])
def test_a_captured_layer_is_one_kernel(
    shape: tuple[int, ...], layer: Any, layers: BiasedLayers, host: fused.FusedState
) -> None:
    launched, x = host.launched, X.view(shape)
    with captured():
        found = layer(x)
    assert found.shape == (*shape[:-1], 24) and torch.allclose(found, by_torch(layer, x), atol=1e-3)
    assert host.launched == launched + 1 and layers.ours == 1
    layer(x)
    assert layers.ours == 1 and nn.Linear.forward is TORCHS, "the capture has ended"


def test_what_no_kernel_computes_is_torchs(
    layer: Any, layers: BiasedLayers, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = host.launched
    odd = nn.Linear(16, 24).half().requires_grad_(False)
    odd.bias = nn.Parameter(torch.ones(1).half(), requires_grad=False)
    without = nn.Linear(16, 24, bias=False).half().requires_grad_(False)
    single = nn.Linear(16, 24).requires_grad_(False)
    wanted = X.clone().requires_grad_()
    with captured():
        assert torch.equal(odd(X), by_torch(odd)) and torch.equal(without(X), by_torch(without))
        assert torch.equal(single(X.float()), by_torch(single, X.float()))
        layer(wanted).sum().backward()
        assert wanted.grad is not None
        monkeypatch.setenv(FUSED_VARIABLE, "0")
        assert torch.equal(layer(X), by_torch(layer))
    assert host.launched == launched and layers.ours == 0


def test_errors_are_torchs(layer: Any, layers: BiasedLayers) -> None:
    with captured():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            layer(torch.ones(5, 8).half())
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(X.float())


def test_captures_may_overlap(layer: Any, layers: BiasedLayers) -> None:
    with captured():
        with captured():
            layer(X)
        Graph.capturing = True
        layer(X)
    assert layers.ours == 2 and nn.Linear.forward is TORCHS
    layers.remove()
    layers.install()
    with captured():
        layer(X)
    assert layers.ours == 3


def test_an_end_without_a_beginning_changes_nothing(layers: BiasedLayers) -> None:
    torch.cuda.CUDAGraph().capture_end()
    assert nn.Linear.forward is TORCHS


def test_a_removal_ends_the_replacement_of_an_open_capture(layer: Any, layers: BiasedLayers) -> None:
    with captured():
        layers.remove()
        assert nn.Linear.forward is TORCHS
        layer(X)
    assert layers.ours == 0
    layers.install()


def test_compiled_code_is_not_compiled_anew(layer: Any, layers: BiasedLayers) -> None:
    seen: list[Any] = []
    run = torch.compile(layer, backend=lambda module, inputs: seen.append(module) or module.forward)
    expected = run(X)
    with captured():
        assert torch.equal(run(X), expected)
    assert len(seen) == 1 and layers.ours == 0
    torch._dynamo.reset()
    with captured():
        assert torch.equal(run(X), expected)
    assert len(seen) == 2 and layers.ours == 0, "what is traced is torch's"


def test_the_method_of_another_package_stays(layer: Any, layers: BiasedLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, input: TORCHS(self, input) + 1)
        with captured():
            assert torch.equal(layer(X), by_torch(layer) + 1)
    assert layers.ours == 0
    with captured():
        layer(X)
    assert layers.ours == 1


def test_methods_of_a_graph_that_another_package_replaced_stay(layer: Any, layers: BiasedLayers, graph: Any) -> None:
    ours, seen = graph.capture_begin, []
    theirs = lambda self, pool=None: (seen.append(pool), ours(self, pool))[1]  # noqa: E731
    graph.capture_begin = theirs
    layers.remove()
    assert graph.capture_begin is theirs
    with captured():
        assert nn.Linear.forward is TORCHS
    layers.install()
    with captured():
        layer(X)
    assert layers.ours == 1 and len(seen) == 2, "it is not installed twice"
    graph.capture_begin = ours


def test_outblas_linear_follows_the_same_rule(layer: Any, graph: Any, host: fused.FusedState) -> None:
    launched = host.launched
    with captured():
        outblas.linear(X, layer.weight, layer.bias)
    assert host.launched == launched + 1
    outblas.linear(X, layer.weight, layer.bias)
    assert host.launched == launched + 1


def test_enable_installs_it_and_counts(layer: Any, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    switch = Switch("CPU", lambda guarantee: "")
    monkeypatch.setattr(enable, "_switch", switch)
    for batch_invariant, ours in ((False, 1), (True, 1)):
        with outblas.use(batch_invariant=batch_invariant), captured():
            if not batch_invariant:
                layer(X)
            assert switch.status()["ours"] == ours
        assert graph.capture_begin is BEGIN
