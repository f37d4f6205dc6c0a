"""The experts of transformers run as one layer while torch's products are replaced, and else as before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
moe = pytest.importorskip("transformers.integrations.moe")

from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.dispatch.grouped import moe_layer, transformers_experts  # noqa: E402
from support.grouped_stand_in import grouped_stand_in  # noqa: E402

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP = 9, 16, 8, 4, 2


def experts(activation: str = "silu", **fields: Any) -> Any:
    from transformers.activations import ACT2FN

    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = EXPERTS, ACT2FN[activation]
            shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
            shapes = tuple(shape[::-1] for shape in shapes) if fields.get("is_transposed") else shapes
            self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.randn(EXPERTS, *each)) for each in shapes)
            if fields.get("has_bias"):
                self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
                self.down_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN))

        def forward(self, *operands: Any) -> Any:
            raise AssertionError("the eager loop")

    torch.manual_seed(0)
    made = moe.use_experts_implementation(Experts, **fields)
    return made(SimpleNamespace(_experts_implementation="grouped_mm"))


def routed() -> tuple[Any, Any, Any]:
    scores, chosen = torch.rand(TOKENS, EXPERTS).topk(TOP)
    return torch.randn(TOKENS, HIDDEN), chosen, scores


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers go to torch's operations in place of kernels, and are counted."""
    layers: list[int] = []

    def layer(*operands: Any, count: Any) -> Any:
        layers.append(1)
        return moe_layer.by_torch(*operands)

    monkeypatch.setattr(transformers_experts, "our_moe_mlp", layer)
    override = Override("CPU")
    override.install()
    yield layers
    override.remove()


@pytest.mark.parametrize("fields", [{}, {"has_bias": True}, {"is_transposed": True, "has_bias": True}], ids=str)
def test_a_layer_gives_transformers_own_result(fields: dict[str, Any], served: list[int]) -> None:
    layer, operands = experts(**fields), routed()
    with torch.no_grad():
        found = layer(*operands)
        assert served == [1]
        want = moe.grouped_mm_experts_forward(layer, *operands)
    torch.testing.assert_close(found, want)
    assert served == [1]


@pytest.mark.parametrize(("torch_is_faster", "ours"), [(False, 2), (True, 1)])
def test_a_product_of_a_layer_that_torch_computes_does_not_count_as_ours(
    torch_is_faster: bool, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = grouped_stand_in(monkeypatch)
    kernels.torch_is_faster = torch_is_faster
    x, chosen, scores = routed()
    override = Override("CPU")
    override.install()
    try:
        with torch.no_grad():
            experts().bfloat16()(x.bfloat16(), chosen, scores)
        assert override.counts()["ours"] == ours
    finally:
        override.remove()


def test_other_layers_and_gradients_are_transformers(served: list[int]) -> None:
    operands = routed()
    layer = experts()
    layer(*operands).sum().backward()
    assert layer.gate_up_proj.grad is not None
    with torch.no_grad():
        experts("gelu")(*operands)
        interleaved = experts()
        interleaved.is_concatenated = False
        interleaved(*operands)
        own = experts()
        type(own)._apply_gate = lambda self, y: y[..., :WIDTH]
        own(*operands)
    assert served == []


def test_transformers_own_is_restored() -> None:
    mapping = moe.ExpertsInterface._global_mapping
    before = mapping["grouped_mm"]
    override = Override("CPU")
    override.install()
    assert mapping["grouped_mm"] is not before
    override.remove()
    assert mapping["grouped_mm"] is before
    override.install()
    mapping["grouped_mm"] = another = lambda *operands: None
    override.remove()
    assert mapping["grouped_mm"] is another, "another package's stays"
    mapping["grouped_mm"] = before
