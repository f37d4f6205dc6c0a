"""``outblas.optimize`` and code around a ``forward``: decorators and a ``__call__`` that may change what it returns."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import outblas  # noqa: E402
from support.models.decoder_blocks import HIDDEN, counted, rows  # noqa: E402

HALF = torch.bfloat16


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * function(self, *args, **kwargs)

    return wrapped


class Block(nn.Module):
    """Two layers; the second one's output is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(HIDDEN, 48), nn.Tanh(), nn.Linear(48, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.outer(self.act(self.inner(x)))


class Decorated(Block):
    @halved
    def forward(self, x: Any) -> Any:
        return self.outer(self.act(self.inner(x)))


class HalvedCall(Block):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * super().__call__(*args, **kwargs)


class TypedCall(Block):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.norm = child, nn.LayerNorm(HIDDEN)

    def forward(self, x: Any) -> Any:
        return x + self.child(self.norm(x))


@pytest.mark.parametrize("kind", [Decorated, HalvedCall, TypedCall])
def test_no_residual_goes_through_code_that_may_change_the_output(kind: type[nn.Module]) -> None:
    model, x = Residual(kind()).eval().to(HALF), rows(3, dtype=HALF)
    wanted = counted(model, x)[0]
    report = outblas.optimize(model)
    assert report.fused == []
    assert "a decorator or __call__ of its module" in report.left_alone["child.outer"]
    assert torch.equal(counted(model, x)[0], wanted)


def test_a_call_that_the_class_gets_later_sees_what_it_saw() -> None:
    class Late(Block):
        forward = Block.forward

    model, x = Residual(Late()).eval().to(HALF), rows(3, dtype=HALF)
    assert outblas.optimize(model).fused == ["child: outer + residual"]
    plain = copy.deepcopy(model)
    outblas.restore(plain)
    Late.__call__ = halved(nn.Module.__call__)  # type: ignore[method-assign]
    torch.testing.assert_close(counted(model, x)[0], counted(plain, x)[0], rtol=0.02, atol=0.02)


def test_decorators_of_transformers_pass_a_residual_on() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    deprecation = pytest.importorskip("transformers.utils.deprecation")

    class Checkpointed(Block, layers.GradientCheckpointingLayer):  # type: ignore[name-defined, misc]
        @deprecation.deprecate_kwarg("y", "99.0.0", new_name="x")  # type: ignore[untyped-decorator]
        def forward(self, x: Any) -> Any:
            return self.outer(self.act(self.inner(x)))

    model, x = Residual(Checkpointed()).eval().to(HALF), rows(3, dtype=HALF)
    wanted = counted(model, x)[0]
    assert outblas.optimize(model).fused == ["child: outer + residual"]
    torch.testing.assert_close(counted(model, x)[0], wanted, rtol=0.02, atol=0.02)
