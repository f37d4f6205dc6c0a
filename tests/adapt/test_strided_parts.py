"""Merged products and code that needs contiguous memory: parts of a merged product have gaps between their rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.strided_parts import reads_layout  # noqa: E402
from support.models.decoder_blocks import HEADS, HIDDEN, counted, rows  # noqa: E402

SIZE = HIDDEN // HEADS


class ViewingNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5)

    def forward(self, x: Any) -> Any:
        return (x.view(-1, SIZE) * self.weight).view(x.shape)


class NormOfMethod(ViewingNorm):
    """A method of it has the view."""

    def scaled(self, x: Any) -> Any:
        return (x.view(-1, SIZE) * self.weight).view(x.shape)

    def forward(self, x: Any) -> Any:
        return self.scaled(x)


class HookedNorm(nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, result: result.view(-1, SIZE).view(result.shape) * 2)


class PlainNorm(ViewingNorm):
    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """A norm of each head, as in Qwen 3."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.norm = norm

    def forward(self, x: Any) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        k = self.norm(self.k(x).view(shape)).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class InBranch(Attention):
    """The norm is in a branch, and a function has the view behind it."""

    def forward(self, x: Any, normed: bool = False) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        if normed:
            q = self.norm(q)
        q = halves_by_view(q)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class WithoutNorm(Attention):
    """A branch, as in Cohere's, needs a norm that the module lacks."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        del self.norm

    def forward(self, x: Any, normed: bool = False) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        if normed:
            q = self.norm(q)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class ByFunction(Attention):
    """A function gets a permuted part."""

    def forward(self, x: Any) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q(x).view(shape).transpose(1, 2)
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(of_one_token(q), k, v)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class ByArgument(Attention):
    """An argument gets a part before it is permuted."""

    def forward(self, x: Any, change: Any = torch.Tensor.clone) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        q = change(q)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class ByArgumentLater(Attention):
    """An argument gets a permuted part."""

    def forward(self, x: Any, change: Any = torch.Tensor.clone) -> Any:
        shape = (*x.shape[:-1], -1, SIZE)
        q = self.q(x).view(shape).transpose(1, 2)
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(change(q), k, v)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


def halves_by_view(x: Any) -> Any:
    return x.view(-1, x.shape[-1]).mul(0.5).view(x.shape)


def of_one_token(x: Any) -> Any:
    """Works in place of a kernel for one token, whose matrix of heads is contiguous."""
    return x.view(-1, SIZE).mul(0.5).view(x.shape) if x.shape[2] == 1 else x * 0.5


@pytest.mark.parametrize(
    "model",
    [
        Attention(ViewingNorm()), Attention(NormOfMethod()), Attention(HookedNorm()), InBranch(nn.Identity()),
        ByFunction(nn.Identity()), ByArgument(nn.Identity()),
    ],
    ids=["norm", "method", "hook", "branch", "function", "argument"],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_stay_apart_whose_outputs_go_to_code_that_needs_contiguous_memory(model: Any, tokens: int) -> None:
    model, x = model.eval(), rows(2, tokens)
    wanted = counted(model, x)[0]
    report = outblas.optimize(model)
    assert report.merged == [] and "the next operation may need contiguous memory" in report.left_alone["q"]
    assert torch.equal(counted(model, x)[0], wanted)


@pytest.mark.parametrize(
    "model",
    [
        Attention(PlainNorm()), Attention(nn.Identity()), Attention(nn.LayerNorm(SIZE)), ByArgumentLater(nn.Identity()),
        WithoutNorm(),
    ],
    ids=["norm", "identity", "layer norm", "argument", "no norm"],
)  # fmt: skip
def test_code_without_a_view_gets_parts(model: Any) -> None:
    model, x = model.eval(), rows(2, 3)
    wanted = counted(model, x)[0]
    assert outblas.optimize(model).merged == ["the model: q, k, v"]
    torch.testing.assert_close(counted(model, x)[0], wanted, rtol=1e-4, atol=1e-4)


def test_code_is_read_by_its_names() -> None:
    scripted = torch.jit.script(doubled)
    assert [reads_layout(code) for code in (torch.cat, F.silu, len, nn.Linear(2, 2))] == [False] * 4
    assert reads_layout(halves_by_view) and reads_layout(of_one_token)
    assert reads_layout(scripted) is None and reads_layout(doubled) is False


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class ByOtherRoutes(nn.Module):
    """Code whose values are not followed has the view."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        q, k = self.q(x).view(*x.shape[:-1], -1, SIZE), self.k(x).view(*x.shape[:-1], -1, SIZE)
        return sum(each.view(-1, SIZE) for each in (q, k))


class InList(ByOtherRoutes):
    def forward(self, x: Any) -> Any:
        q, k = self.q(x).view(*x.shape[:-1], -1, SIZE), self.k(x).view(*x.shape[:-1], -1, SIZE)
        both = [q, k]
        return both[0].view(-1, SIZE) + both[1].view(-1, SIZE)


class InLambda(ByOtherRoutes):
    def forward(self, x: Any) -> Any:
        q, k = self.q(x).view(*x.shape[:-1], -1, SIZE), self.k(x).view(*x.shape[:-1], -1, SIZE)
        rows_of = lambda: q.view(-1, SIZE)  # noqa: E731
        return rows_of() + k.reshape(-1, SIZE)


class InLoop(ByOtherRoutes):
    def forward(self, x: Any) -> Any:
        q, k = self.q(x).view(*x.shape[:-1], -1, SIZE), self.k(x).view(*x.shape[:-1], -1, SIZE)
        total = 0
        for each in (q, k):
            total = total + each.view(-1, SIZE)
        return total


@pytest.mark.parametrize("kind", [ByOtherRoutes, InList, InLambda, InLoop])
def test_a_view_on_a_route_that_is_not_followed_keeps_layers_apart(kind: type[nn.Module]) -> None:
    model, x = kind().eval(), rows(2, 3)
    with torch.no_grad():
        before = model(x)
        assert not outblas.optimize(model).merged
        assert torch.equal(model(x), before)
