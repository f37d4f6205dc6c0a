"""Products of weights in one matrix: joined and fused in graphs, and computed apart where the weights have moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: E402
from torch.nn import functional  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch import fused, fused_layer  # noqa: E402
from outblas.dispatch.fusion import joined_operators  # noqa: E402
from outblas.dispatch.fusion.joined_products import join_products  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.model_steps_fixture import ours_fixture  # noqa: F401  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
BIASED = torch.ops.outblas.addmm_joined.default
JOINED, GATED = torch.ops.outblas.mm_joined.default, torch.ops.outblas.gated_joined.default


def below(*rows: int, k: int = 8) -> list[Any]:
    """Weights one below the other."""
    return list(numbers(sum(rows), k, seed=1).split(rows))


def by_turns(count: int = 2, h: int = 5, k: int = 8) -> list[Any]:
    matrix = numbers(count * h, k, seed=2)
    return [matrix[i::count] for i in range(count)]


def never(*_: Any) -> bool:
    return False


def always(*_: Any) -> bool:
    return True


def traced(function: Callable[..., Any], *operands: Any) -> Any:
    """The graph as Inductor has it: of fake tensors, without a gradient, silu taken apart."""
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*operands)
    module.graph.eliminate_dead_code()
    return module


def counted(module: Any) -> dict[Any, int]:
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    return {target: targets.count(target) for target in (MM, ADDMM, JOINED, BIASED, GATED) if target in targets}


def products(x: Any, *weights: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return [(x.reshape(flat.shape) @ w.t()).reshape(2, 3, -1) + 1 for w in weights]


def test_a_matrix_is_found_by_its_parts() -> None:
    q, k, v = below(4, 3, 2)
    whole = joined_operators.joined_matrix([q, k, v], by_turns=False)
    assert whole is not None and torch.equal(whole, torch.cat([q, k, v])) and whole.data_ptr() == q.data_ptr()
    gate, up = by_turns()
    mixed = joined_operators.joined_matrix([gate, up], by_turns=True)
    assert mixed is not None and torch.equal(mixed[0::2], gate) and torch.equal(mixed[1::2], up)
    for weights, turns in (
        ([q, v], False),
        ([k, q], False),
        ([q, k.clone()], False),
        ([gate, up], False),
        ([q, k], True),
        ([up, gate], True),
        ([q, k[:, :4]], False),
        ([q, k.flatten()], False),
        ([gate, up[:3]], True),
    ):
        assert joined_operators.joined_matrix(weights, turns) is None


@pytest.mark.parametrize("weights", [below(4, 3, 2), by_turns(), by_turns(3)], ids=["below", "turns", "three"])
def test_products_of_one_input_are_joined(weights: list[Any], served: Served) -> None:
    x = numbers(2, 3, 8)
    module = traced(products, x, *weights)
    assert join_products(module.graph, never, never) == 0 and counted(module) == {MM: len(weights)}
    assert join_products(module.graph, lambda a, w: a.shape == (6, 8) and w.shape[1] == 8, never) == 1
    assert counted(module) == {JOINED: 1}
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    for got, expected in zip(module(x, *weights), products(x, *weights), strict=True):
        assert torch.equal(got, expected)
    assert len(served.ran) == 1 and served.ran[0].n == sum(len(w) for w in weights)
    moved = [w.clone() for w in weights]  # a graph outlives the place of its weights
    for got, expected in zip(module(x, *moved), products(x, *weights), strict=True):
        assert torch.equal(got, expected)
    assert len(served.ran) == 1 + len(weights)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_products_with_biases_are_joined(
    turns: bool, ready: bool, served: Served, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(x: Any, *parameters: Any) -> Any:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        return [torch.addmm(b, x, w.t()) + 1 for w, b in zip(weights, biases, strict=True)]

    x, weights, vector = numbers(6, 8), by_turns(3) if turns else below(4, 3, 2), numbers(15 if turns else 9, seed=3)
    biases = [vector[i::3] for i in range(3)] if turns else list(vector.split([4, 3, 2]))
    module = traced(layers, x, *weights, *biases)
    assert join_products(module.graph, always, always) == 1 and counted(module) == {BIASED: 1}
    monkeypatch.setattr(fused_layer, "kernel_adds_bias", lambda x: ready)
    if ready:
        joined = joined_operators.joined_matrix(weights, turns)
        assert joined is not None and outblas.warm(x, joined, joined_operators.joined_vector(biases, turns))
    before = host.launched
    expected = layers(x, *weights, *biases)
    for got, wanted in zip(module(x, *weights, *biases), expected, strict=True):
        assert torch.equal(got, wanted)
    assert host.launched == before + ready
    for got, wanted in zip(module(x, *weights, *(b.clone() for b in biases)), expected, strict=True):
        assert torch.equal(got, wanted)
    assert host.launched == before + ready


def two_layers(x: Any, q: Any, k: Any, b: Any, c: Any) -> Any:
    return torch.addmm(b, x, q.t()) + 1, torch.addmm(c, x, k.t()) + 1


def two_scaled(x: Any, q: Any, k: Any, b: Any, c: Any) -> Any:
    return torch.addmm(b, x, q.t(), beta=2) + 1, torch.addmm(c, x, k.t(), beta=2) + 1


def test_biases_apart_keep_products_apart(served: Served) -> None:
    x, (q, k), together = numbers(6, 8), below(4, 4), numbers(8).split(4)
    for biases in ((numbers(4), numbers(4)), (numbers(6, 4), numbers(6, 4)), (together[1], together[0])):
        module = traced(two_layers, x, q, k, *biases)
        assert join_products(module.graph, always, always) == 0 and counted(module) == {ADDMM: 2}
    scaled = traced(two_scaled, x, q, k, *together)
    assert join_products(scaled.graph, always, always) == 0


def other_inputs(x: Any, q: Any, k: Any) -> Any:
    return x @ q.t() + 1, (x + 1) @ k.t() + 1


def results_of_the_graph(x: Any, q: Any, k: Any) -> Any:
    return x @ q.t(), x @ k.t()


def reshaped_results(x: Any, q: Any, k: Any) -> Any:
    return (x @ q.t()).reshape(3, 2, 2), (x @ k.t()).reshape(3, 2, 2)


def one_weight_twice(x: Any, q: Any, k: Any) -> Any:
    return x @ q.t() + 1, x @ q.t() + x @ q.t()


def no_turn(x: Any, q: Any, k: Any) -> Any:
    return x[:, :4] @ q[:, :4].permute(0, 1) + 1, x[:, :4] @ k[:, :4].permute(0, 1) + 1


def no_transposes(x: Any, q: Any, k: Any) -> Any:
    return x[:, :4] @ q + 1, x[:, :4] @ k + 1


@pytest.mark.parametrize(
    "function", [other_inputs, results_of_the_graph, reshaped_results, one_weight_twice, no_turn, no_transposes]
)
def test_other_products_stay_as_they_are(function: Any, served: Served) -> None:
    module = traced(function, numbers(3, 8), *below(4, 4))
    before = counted(module)
    assert join_products(module.graph, always, always) == 0 and counted(module) == before and before[MM] >= 2


def test_weights_that_lie_elsewhere_stay_as_they_are(served: Served) -> None:
    module = traced(results_of_the_graph, numbers(3, 8), numbers(4, 8), numbers(4, 8, seed=1))
    assert join_products(module.graph, always, always) == 0 and counted(module) == {MM: 2}


def test_nodes_of_other_passes_may_have_no_value(served: Served) -> None:
    for op, target in (("placeholder", None), ("call_function", MM), ("call_function", torch.ops.aten.permute.default)):
        module = traced(products, numbers(2, 3, 8), *below(4, 3))
        for node in module.graph.nodes:
            if node.op == op and target in (None, node.target):
                del node.meta["val"]
        assert join_products(module.graph, always, always) == (1 if target is MM else 0)
    module = traced(lambda x, gate, up: functional.silu(x @ gate.t()) * (x @ up.t()) + 1, numbers(3, 8), *by_turns())
    for node in module.graph.nodes:
        if node.target is MM:
            del node.meta["val"]
    assert join_products(module.graph, never, always) == 0


def test_symbols_stay_as_they_are_and_give_no_guard(served: Served) -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x, q, k = (mode.from_tensor(each, symbolic_context=symbolic) for each in (numbers(3, 8), *below(4, 4)))
    module = make_fx(two_products, tracing_mode="fake")(x, q, k)
    guards = len(shapes.guards)
    assert join_products(module.graph, always, always) == 0 and len(shapes.guards) == guards


def two_products(x: Any, q: Any, k: Any) -> Any:
    return x @ q.t() + 1, x @ k.t() + 1


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("up_first", [False, True])
def test_a_gate_is_one_operator(name: str, up_first: bool, served: Served, host: fused.FusedState) -> None:
    def function(x: Any, gate: Any, up: Any) -> Any:
        flat = x.reshape(6, 8)
        left = ACTIVATIONS[name]((flat @ gate.t()).reshape(2, 3, 5))
        right = (flat @ up.t()).reshape(2, 3, 5)
        return (right * left if up_first else left * right) + 1

    x, weights = numbers(2, 3, 8), by_turns()
    module = traced(function, x, *weights)
    asked: list[Any] = []

    def serves(a: Any, w: Any, activation: str) -> bool:
        asked.append((tuple(a.shape), tuple(w.shape), activation))
        return True

    assert join_products(module.graph, never, serves) == 1 and counted(module) == {GATED: 1}
    assert asked == [((6, 8), (10, 8), name)]
    assert len([node for node in module.graph.nodes if node.op == "call_function"]) <= 5, "the chain is gone"
    expected = function(x.double(), *(w.double() for w in weights))
    for given in (weights, [w.clone() for w in weights]):
        torch.testing.assert_close(module(x, *given).double(), expected, rtol=3e-3, atol=3e-3)
    joined = joined_operators.joined_matrix(weights, by_turns=True)
    assert outblas.warm(x.reshape(6, 8), joined, activation=name, gated=True)
    before = host.launched
    torch.testing.assert_close(module(x, *weights).double(), expected, rtol=1e-3, atol=1e-3)
    assert host.launched == before + 1


def relu_gate(x: Any, gate: Any, up: Any) -> Any:
    return torch.relu(x @ gate.t()) * (x @ up.t()) + 1


def nearly_silu(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu(1.01 * (x @ gate.t())) * (x @ up.t()) + 1


def gate_read_twice(x: Any, gate: Any, up: Any) -> Any:
    y = x @ gate.t()
    return functional.silu(y) * (x @ up.t()) + y


def up_read_twice(x: Any, gate: Any, up: Any) -> Any:
    y = x @ up.t()
    return functional.silu(x @ gate.t()) * y + y


def gate_of_both(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu(x @ gate.t() + x @ up.t()) * (x @ up.t()) + 1


def gate_in_fp32(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu((x @ gate.t()).float()) * (x @ up.t()) + 1


def gate_of_each_pair(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu((x @ gate.t()).reshape(15, 1)) * (x @ up.t()).reshape(1, 15) + 1


def pairs_within_a_gate(x: Any, gate: Any, up: Any) -> Any:
    y = x @ gate.t()
    return (y.reshape(15, 1) * torch.sigmoid(y.reshape(1, 15))).sum(1).reshape(3, 5) * (x @ up.t()) + 1


def whole_gates(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu((x @ gate.t()).int().half()) * (x @ up.t()) + 1


def silu_of_up(x: Any, gate: Any, up: Any) -> Any:
    return functional.silu(x @ up.t()) * (x @ gate.t()) + 1


@pytest.mark.parametrize(
    "function",
    [
        relu_gate,
        nearly_silu,
        gate_in_fp32,
        gate_of_each_pair,
        pairs_within_a_gate,
        whole_gates,
        gate_read_twice,
        up_read_twice,
        gate_of_both,
        silu_of_up,
    ],
)
def test_what_is_no_gate_is_joined_alone(function: Any, served: Served) -> None:
    x, weights = numbers(3, 8), by_turns()
    module = traced(function, x, *weights)
    before = counted(module)
    assert join_products(module.graph, never, always) == 0 and counted(module) == before
    if before == {MM: 2}:
        assert join_products(module.graph, always, always) == 1 and counted(module) == {JOINED: 1}
    torch.testing.assert_close(module(x, *weights), function(x, *weights))


class Layers(torch.nn.Module):
    """Two layers of one input whose weights lie in one matrix, and a gate whose weights lie by turns."""

    def __init__(self) -> None:
        super().__init__()
        for names, weights in ((("q", "k"), below(4, 3)), (("gate", "up"), by_turns())):
            for name, weight in zip(names, weights, strict=True):
                layer = torch.nn.Linear(8, len(weight), bias=False, dtype=weight.dtype)
                layer.weight.data = weight
                self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        q, k = self.q(x) + 1, self.k(x) + 1
        return q, k, functional.silu(self.gate(x)) * self.up(x) + 1


def test_a_compiled_module_is_right_after_its_weights_have_moved(ours: Served, host: fused.FusedState) -> None:
    layers, x = Layers(), numbers(3, 8)
    before = outblas.status()["torch"]["compiled"]
    with torch.no_grad(), outblas.use(), fresh_cache():  # a cached graph had its pass before
        expected = layers(x)
        run = torch.compile(layers, backend="inductor", fullgraph=True, dynamic=False)
        for _ in range(2):
            for got, wanted in zip(run(x), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=3e-3, atol=3e-3)
            for parameter in layers.parameters():  # elsewhere, with the same strides: no guard sees it
                place = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                parameter.data = place.copy_(parameter)
    assert outblas.status()["torch"]["compiled"] == before + 2
    torch._dynamo.reset()


def test_gradients_of_a_compiled_module_are_right(ours: Served, host: fused.FusedState) -> None:
    layers, x = Layers(), numbers(3, 8).requires_grad_()

    def gradients(run: Any) -> list[Any]:
        return list(torch.autograd.grad(sum(y.float().sum() for y in run(x)), [x, *layers.parameters()]))

    with outblas.use(), fresh_cache():
        expected = gradients(layers)
        found = gradients(torch.compile(layers, backend="inductor", fullgraph=True, dynamic=False))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()
