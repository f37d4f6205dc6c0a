"""``outblas.optimize`` and activations that are modules: children of theirs, hooks, replacements and training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.module_draft import plan_of  # noqa: E402
from outblas.adapt.structures import activation_of  # noqa: E402
from support.models.decoder_blocks import HIDDEN, counted, rows  # noqa: E402

HALF = torch.bfloat16


class Activated(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(HIDDEN, 48), act

    def forward(self, x: Any) -> Any:
        return self.act(self.layer(x))


class OfMethod(Activated):
    """A method applies the child."""

    def apply_act(self, x: Any) -> Any:
        return self.act(x)

    def forward(self, x: Any) -> Any:
        return self.apply_act(self.layer(x))


class DropsOut(nn.Module):
    """A dropout by a function, which has no child."""

    def forward(self, x: Any) -> Any:
        return F.dropout(F.gelu(x), 0.5, self.training)


SHARED = nn.GELU()


class OfGlobal(Activated):
    def forward(self, x: Any) -> Any:
        return SHARED(self.layer(x))


def _drop_out(act: Any) -> None:
    for one in act.modules():
        if isinstance(one, nn.Dropout):
            one.train()


def _hook(act: Any) -> None:
    act[0].register_forward_hook(lambda module, given, result: result * 3)


def _replace(act: Any) -> None:
    act[0] = nn.Tanh()


@pytest.mark.parametrize("change", [_drop_out, _hook, _replace])
@pytest.mark.parametrize("kind", [Activated, OfMethod])
def test_an_activation_with_children_runs_its_own_code(kind: type[Activated], change: Callable[[Any], None]) -> None:
    model, x = kind(nn.Sequential(nn.GELU(), nn.Dropout(0.5))).eval().to(HALF), rows(3, dtype=HALF)
    plain = copy.deepcopy(model)
    assert outblas.optimize(model).fused == []
    found = []
    for one in (model, plain):
        change(one.act)
        torch.manual_seed(0)
        found.append(counted(one, x)[0])
    assert torch.equal(*found)


def test_an_activation_alone_in_training_may_drop_out() -> None:
    model, x = Activated(DropsOut()).eval().to(HALF), rows(3, dtype=HALF)
    assert outblas.optimize(model).fused == ["the model: gelu(layer)"]
    assert bool(counted(model, x)[0].all())
    model.act.train()
    assert not bool(counted(model, x)[0].all())


def test_a_forward_that_an_activation_gets_later_runs() -> None:
    model, x = Activated(nn.GELU()).eval().to(HALF), rows(3, dtype=HALF)
    assert outblas.optimize(model).fused == ["the model: gelu(layer)"]
    model.act.forward = torch.zeros_like
    assert not bool(counted(model, x)[0].any())


@pytest.mark.parametrize("before", [False, True])
def test_no_hook_of_an_activation_sees_a_probe(before: bool) -> None:
    act = nn.GELU()
    model, seen = Activated(act).eval().to(HALF), []
    if before:
        act.register_forward_pre_hook(lambda module, given: seen.append(given))
    else:
        act.register_forward_hook(lambda module, given, result: seen.append(given))
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, given, result: seen.append(given))
    try:
        assert outblas.optimize(model).fused == []
        assert activation_of(nn.GELU()) == "gelu"
    finally:
        everywhere.remove()
    assert seen == []


def test_a_module_outside_of_the_model_stays_where_it_is() -> None:
    assert outblas.optimize(OfGlobal(nn.SiLU()).eval().to(HALF)).fused == []


class Scaled(nn.Module):
    """An activation with a buffer, which a state dict may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Any) -> Any:
        return F.silu(x) * self.scale


class OtherInTraining(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.silu(x) if self.training else F.hardswish(x)


class SiluOutsideOfTraining(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.hardswish(x) if self.training else F.silu(x)


def test_a_buffer_and_the_mode_of_training_decide() -> None:
    assert activation_of(Scaled()) is None
    assert activation_of(OtherInTraining()) is None and activation_of(OtherInTraining().eval()) is None
    module = SiluOutsideOfTraining()
    assert activation_of(module) == "silu" and module.training


def test_an_activation_of_the_class_is_in_no_mode() -> None:
    class Gate(nn.Module):
        act = nn.SiLU()

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48)

        def forward(self, x: Any) -> Any:
            return self.act(self.gate(x)) * self.up(x)

    model = Gate().to(HALF).eval()
    assert Gate.act.training and outblas.optimize(model).fused == ["the model: silu(gate) * up"]
    plan = plan_of(model)
    assert plan is not None and plan.runs(model) is False, "this test records gradients"
    with torch.no_grad():
        assert plan.runs(model)
