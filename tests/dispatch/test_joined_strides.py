"""Joined products in compiled graphs: what needs the strides, the dtype or the place of a product keeps it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import outblas  # noqa: E402
from dispatch.test_joined_products import GATED, always, below, by_turns, counted, never, traced  # noqa: E402
from outblas.adapt.joined_weights import JoinedWeights  # noqa: E402
from outblas.dispatch import fused, inductor_pass, torch_op  # noqa: E402
from outblas.dispatch.fusion.joined_products import join_products  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.model_steps_fixture import ours_fixture  # noqa: F401  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

_ATEN = torch.ops.aten


class TwoLayers(torch.nn.Module):
    """Layers of one input, and what follows them. Their weights lie in one matrix, or apart."""

    def __init__(self, then: Callable[..., Any], joined: bool = True) -> None:
        super().__init__()
        self.then = then
        for name, weight in zip("qk", below(4, 4), strict=True):
            layer = torch.nn.Linear(8, 4, bias=False, dtype=weight.dtype)
            layer.weight.data = weight if joined else weight.clone()
            self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        return self.then(self.q(x), self.k(x))


def compiled(layers: TwoLayers, x: Any) -> tuple[Any, int]:
    """The results of a compiled module, and the number of operators in its graph; the cache stays as it is."""
    torch._dynamo.reset()
    before = outblas.status()["torch"]["compiled"]
    found = torch.compile(layers, fullgraph=True, dynamic=False)(x)
    torch._dynamo.reset()
    return found, outblas.status()["torch"]["compiled"] - before


@pytest.mark.parametrize(
    ("then", "operators"),
    [
        pytest.param(lambda q, k: (q + 1, k + 1), 1, id="joined"),
        pytest.param(lambda q, k: (q.view(6, 2, 2).transpose(0, 1) + 1, k.t().contiguous() + 1), 1, id="views inside"),
        pytest.param(lambda q, k: (q.t(), k.t()), 2, id="transposed results"),
        pytest.param(lambda q, k: (q[:, :2], k[1:]), 2, id="sliced results"),
        pytest.param(lambda q, k: (q.unsqueeze(0), k.unsqueeze(0)), 2, id="results of more dimensions"),
        pytest.param(lambda q, k: (q.as_strided((5, 4), (4, 1)) + 1, k.as_strided((5, 4), (4, 1)) + 1), 2, id="places"),
        pytest.param(lambda q, k: (q.view(torch.int32) + 1, k.view(torch.int16) + 1), 2, id="bits"),
    ],
)
def test_results_have_the_values_and_strides_of_products_apart(
    then: Callable[..., Any], operators: int, ours: Served, host: fused.FusedState
) -> None:
    layers, x = TwoLayers(then), numbers(6, 8)
    with torch.no_grad(), outblas.use(), fresh_cache():
        expected = layers(x)
        found, made = compiled(layers, x)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert made == operators


def test_an_operator_of_others_keeps_products_apart(served: Served) -> None:
    library = torch.library.Library("outblas_test", "FRAGMENT")
    library.define("flat(Tensor a) -> Tensor")
    library.impl("flat", lambda a: a.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("outblas_test::flat", torch.empty_like, lib=library)
    flat = torch.ops.outblas_test.flat.default
    module = traced(lambda x, q, k: (flat(x @ q.t()) + 1, x @ k.t() + 1), numbers(3, 8), *below(4, 4))
    assert join_products(module.graph, always, never) == 0


def test_an_activation_that_is_rounded_to_eight_bits_is_no_gate(served: Served, host: fused.FusedState) -> None:
    def gated(x: Any, gate: Any, up: Any) -> Any:
        return functional.silu(x @ gate.t()).to(torch.float8_e4m3fn).to(x.dtype) * (x @ up.t()) + 1

    module = traced(gated, numbers(3, 8), *by_turns())
    assert join_products(module.graph, never, always) == 0 and GATED not in counted(module)


def test_a_long_chain_that_branches_is_walked_once(served: Served) -> None:
    def deep(x: Any, gate: Any, up: Any) -> Any:
        y = x @ gate.t()
        for _ in range(64):
            y = functional.silu(y)
        return y * (x @ up.t()) + 1

    module = traced(deep, numbers(3, 8), *by_turns())
    assert join_products(module.graph, never, always) == 0


def test_biases_of_one_element_keep_products_apart(served: Served) -> None:
    def biased(x: Any, q: Any, k: Any, b: Any, c: Any) -> Any:
        return torch.addmm(b, x, q.t()) + 1, torch.addmm(c, x, k.t()) + 1

    both = numbers(2, seed=5)
    operands = (numbers(6, 8), *below(4, 4), both[:1], both[1:])
    module = traced(biased, *operands)
    assert join_products(module.graph, always, never) == 0
    for got, wanted in zip(module(*operands), biased(*operands), strict=True):
        assert torch.equal(got, wanted)


def test_products_with_keywords_stay_as_they_are(served: Served) -> None:
    module = traced(lambda x, q: x @ q.t() + 1, numbers(3, 8), numbers(4, 8))
    (node,) = module.graph.find_nodes(op="call_function", target=_ATEN.mm.default)
    node.kwargs, node.args = dict(zip(("self", "mat2"), node.args, strict=True)), ()
    assert join_products(module.graph, always, always) == 0
    assert inductor_pass.replace_products(module.graph, always) == 0


@pytest.mark.parametrize("first_joined", [False, True])
def test_the_cache_tells_joined_weights_from_others(first_joined: bool, ours: Served, host: fused.FusedState) -> None:
    x, made = numbers(6, 8), dict[bool, int]()
    with torch.no_grad(), outblas.use(), fresh_cache():
        for joined in (first_joined, not first_joined):
            layers = TwoLayers(lambda q, k: (q + 1, k + 1), joined=False)
            keeper = JoinedWeights([layers.q, layers.k]) if joined else None
            made[joined] = compiled(layers, x)[1]
            if keeper is not None:
                keeper.separate()
    assert made == {True: 1, False: 2}


class Seen(TorchDispatchMode):
    """Keeps the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Any] = []

    def __torch_dispatch__(self, target: Any, types: Any, arguments: Any = (), kwargs: Any = None) -> Any:
        self.targets.append(target)
        return target(*arguments, **(kwargs or {}))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_a_batch_of_vmap_keeps_its_guarantee(in_dims: tuple[int | None, int | None], ours: Served) -> None:
    shapes = ((3, 8), (8, 5))
    a, b = (
        numbers(*(shape if d is None else (*shape[:d], 2, *shape[d:])), seed=i)
        for i, (shape, d) in enumerate(zip(shapes, in_dims, strict=True))
    )
    one_by_one = [[t if d is None else t.select(d, i) for t, d in ((a, in_dims[0]), (b, in_dims[1]))] for i in range(2)]
    for guarantee, operator in torch_op.MM.items():
        with Seen() as mode:
            found = torch.func.vmap(operator, in_dims)(a, b)
        assert torch.equal(found, torch.stack([torch.mm(*pair) for pair in one_by_one]))
        assert mode.targets.count(operator) == (0 if guarantee == "none" else 2)
