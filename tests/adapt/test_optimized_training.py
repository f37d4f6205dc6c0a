"""Optimisers, hooks and compiled parts of optimised models: nothing is trained, kept or computed wrongly."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch
from torch import nn

import outblas
from outblas.adapt.model_weights import model_weights
from support.models.decoder_blocks import rows

HALF = torch.bfloat16


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 6, bias=False), nn.Linear(32, 6, bias=False)
        self.down = nn.Linear(6, 32, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 8, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Any) -> Any:
        return self.q(x).view(*x.shape[:-1], -1, 4), self.k(x).view(*x.shape[:-1], -1, 4)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(rows(3, dtype=HALF)).float().pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), id="fused AdamW"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), id="fused SGD"),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True), id="fused Adagrad"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), id="foreach AdamW"),
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_optimisers_change_what_they_change_in_a_plain_model(
    make: Callable[[Any], torch.optim.Optimizer], before: bool, training: bool
) -> None:
    plain = Gated().to(HALF).train(training)
    model = copy.deepcopy(plain)
    early = make(model.parameters()) if before else None
    assert outblas.optimize(model).fused == ["the model: silu(gate) * up"]
    trained(model, early or make(model.parameters()))
    trained(plain, make(plain.parameters()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()
    with torch.no_grad():
        x = rows(3, dtype=HALF)
        assert torch.equal(model.eval()(x), plain.eval()(x))
    assert outblas.optimize(model).fused == ["the model: silu(gate) * up"], "a later call joins them again"


def test_an_optimiser_of_other_parameters_leaves_gates_joined() -> None:
    model, other = Gated().to(HALF).eval(), nn.Linear(32, 32, dtype=HALF)
    outblas.optimize(model)
    trained(other, torch.optim.AdamW([*other.parameters(), *model.down.parameters()], fused=True))
    assert not model.gate.weight.is_contiguous() and len(model_weights(model)) == 2


def test_weights_one_below_the_other_stay_joined_while_they_train() -> None:
    model = Attention().to(HALF)
    assert outblas.optimize(model).merged == ["the model: q, k"]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sum(part.float().sum() for part in model(rows(3, dtype=HALF))).backward()
    optimizer.step()
    assert len(model_weights(model)) == 1


def test_a_forward_that_was_replaced_meanwhile_does_not_keep_weights_joined() -> None:
    model, x = Gated().to(HALF).eval(), rows(3, dtype=HALF)
    with torch.no_grad():
        wanted = model(x)
    outblas.optimize(model)
    ours = model.forward
    model.forward = types.MethodType(lambda self, x: ours(x) + 0, model)  # type: ignore[method-assign]
    assert outblas.restore(model) == 1
    assert all(parameter.is_contiguous() for parameter in model.parameters()) and len(model_weights(model)) == 3
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
        model.forward = ours  # type: ignore[method-assign]
        assert torch.equal(model(x), wanted)
    assert outblas.restore(model) == 1 and "forward" not in model.__dict__ and outblas.restore(model) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_jit_has_compiled_is_left_alone() -> None:
    x = rows(3, dtype=HALF)
    traced = torch.jit.trace(Gated().to(HALF).eval(), x)
    model = nn.Sequential(traced, Gated().to(HALF).eval())
    with torch.no_grad():
        wanted = model(x)
        report = outblas.optimize(model)
        torch.testing.assert_close(model(x), wanted, rtol=0.02, atol=0.02)
    assert report.fused == ["1: silu(gate) * up"]


def test_a_replica_of_data_parallel_has_weights_of_its_own() -> None:
    model, x = Gated().to(HALF).eval(), rows(3, dtype=HALF)
    outblas.optimize(model)
    replica = model._replicate_for_data_parallel()  # type: ignore[operator]
    replica._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    for parameter in replica.down.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        assert not replica(x).any() and model(x).any()
    assert outblas.restore(model) == 1 and model._replicate_for_data_parallel.__func__ is (  # type: ignore[union-attr]
        nn.Module._replicate_for_data_parallel
    )


def test_layers_without_elements_or_extents_have_no_products() -> None:
    model = nn.Sequential(nn.Linear(0, 8), nn.LazyLinear(8), nn.Linear(8, 0), nn.Linear(8, 4))
    assert [(one.weight.shape[0], one.weight.shape[1]) for one in model_weights(model)] == [(4, 8)]
