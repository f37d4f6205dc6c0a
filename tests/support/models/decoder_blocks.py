"""Small decoders in other spellings than transformers', and counts of what a call of one computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.operator_counts import OperatorCounts

HIDDEN, HEADS = 32, 4
ODD = 7


class Attention(nn.Module):
    """Names that no library uses, sizes by ``size()``, and one output."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.ask, self.key, self.worth = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.size = HIDDEN // HEADS

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.size()
        q = self.ask(x).view(batch, tokens, -1, self.size).transpose(1, 2)
        k = self.key(x).view(batch, tokens, -1, self.size).transpose(1, 2)
        v = self.worth(x).view(batch, tokens, -1, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class SpelledOut(nn.Module):
    """A gate in several statements, by a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48)
        self.back = nn.Linear(48, HIDDEN)

    def forward(self, x: Any) -> Any:
        left = self.one(x)
        right = self.two(x)
        left = F.gelu(left, approximate="tanh")
        return self.back(right * left)


class Layer(nn.Module):
    """Both behind norms; one sum has the residual on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), SpelledOut()
        self.norm = nn.LayerNorm(HIDDEN)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        x = x + self.drop(self.attention(self.norm(x)))
        kept = x
        x = self.mlp(self.norm(x))
        return x + kept


class Decoder(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoInputs(nn.Module):
    """Layers of different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        y = x.tanh()
        return self.a(x).view(*x.shape[:-1], -1, 8), self.b(y).view(*x.shape[:-1], -1, 8)


class Mixes(nn.Module):
    """Its outputs go where a part of a wider matrix cannot go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.a(x).view(-1, 8), self.b(x).view(-1, 8)


class FirstTwoExtents(nn.Module):
    """Reads two extents of its input, whatever its rank, and looks at a result in other shapes later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Any) -> Any:
        first = self.a(x).view(x.shape[0], x.shape[1], -1, 8)
        second = self.b(x).view(x.shape[0], x.shape[1], -1, 8)
        rows = second.view(-1, 8)
        return first, rows, second[:, 0].view(x.shape[0], -1), second.view(torch.int16 if halves(second) else x.dtype)


def halves(x: Any) -> bool:
    """Return True for a dtype of two bytes."""
    return bool(x.element_size() == 2)


class Branches(nn.Module):
    """A layer that runs under a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, more: bool = False) -> Any:
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        if more:
            y = self.b(x).view(*x.shape[:-1], -1, 8)
        return y


class InPlace(nn.Module):
    """Changes its input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        x.mul_(2)
        return y, self.b(x).view(*x.shape[:-1], -1, 8)


def _double(x: Any) -> Any:
    return x.mul_(2)


class Doubles(nn.Module):
    """Changes its input, and returns a factor."""

    def forward(self, x: Any) -> Any:
        x.mul_(2)
        return 0.5


class DoublesByFunction(nn.Module):
    """Changes its input in a function of its own."""

    def forward(self, x: Any) -> Any:
        _double(x)
        return 0.5


class Halves(nn.Module):
    """Reads its input alone."""

    def forward(self, x: Any) -> Any:
        return x.new_full((), 0.5)


class AroundChild(nn.Module):
    """Two layers of one input, and a child between them that gets a view of the input."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.child = child

    def forward(self, x: Any) -> Any:
        same = x.transpose(0, 1)
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        factor = self.child(same)
        return y * factor + self.b(x).view(*x.shape[:-1], -1, 8)


class GateAroundChild(nn.Module):
    """A gate, and a child between its two layers that gets their input."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.child = child

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        self.child(x)
        return y * F.silu(self.b(x))


class SumAroundChild(nn.Module):
    """A sum with what a child returns, and another child before it that gets the residual."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner, self.child = Inner(), child

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        self.child(x)
        return x + y


class Inner(nn.Module):
    """Returns what a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.last(x)


class HiddenInPlace(nn.Module):
    """A function changes the input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        _double(x)
        return y, self.b(x).view(*x.shape[:-1], -1, 8)


class ReadsTwice(nn.Module):
    """A gate that something else reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        gate = F.silu(self.a(x))
        return gate * self.b(x) + gate


class LateResidual(nn.Module):
    """The residual does not exist before the child is called."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SpelledOut()

    def forward(self, x: Any) -> Any:
        y = self.mlp(x)
        z = x * 2
        return z + y


def decoder(dtype: Any = torch.float32) -> nn.Module:
    """Return a decoder with the same random weights every time."""
    torch.manual_seed(0)
    return Decoder().eval().to(dtype)


def rows(*leading: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """Return random rows (*leading, HIDDEN)."""
    return torch.randn(*leading, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def counted(call: Any, *arguments: Any, **keywords: Any) -> tuple[Any, Counter[str]]:
    """Return what a call without gradients returns, and the counts of ATen's operators in it."""
    with torch.no_grad(), OperatorCounts() as seen:
        result = call(*arguments, **keywords)
    return result, seen.counts


def products(counts: Counter[str]) -> int:
    """Return the number of matrix products, attention aside."""
    return sum(counts[name] for name in ("mm", "addmm", "linear"))


class ChildInPlace(nn.Module):
    """A child changes the input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        self.act(x)
        return y, self.b(x).view(*x.shape[:-1], -1, 8)


class Private(nn.Module):
    """Names of layers that Python writes otherwise inside a class."""

    def __init__(self) -> None:
        super().__init__()
        self.__a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.__a(x).view(*x.shape[:-1], -1, 8), self.b(x).view(*x.shape[:-1], -1, 8)


class Conditional(nn.Module):
    """A residual is added in a branch only, and returned early otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SpelledOut()

    def forward(self, x: Any, more: bool = True) -> Any:
        if not more:
            return self.mlp(x)
        return x + self.mlp(x)


class GateOfChangedInput(nn.Module):
    """A child changes the input between the two layers of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.act, self.clamp = nn.SiLU(), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        gate = self.act(self.a(x))
        self.clamp(x)
        return gate * self.b(x)


class ChangedResidual(nn.Module):
    """A child changes the residual between the layer's call and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SpelledOut()
        self.clamp = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.mlp(x)
        self.clamp(x)
        return x + y


class GateOfRenamedInput(nn.Module):
    """In a branch, the name of the input gets another value between the layers and the multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, more: bool = True) -> Any:
        y = x
        if more:
            gate = self.a(x)
            up = self.b(x)
            x = x + 1
            y = F.silu(gate) * up
        return y + x


class NestedInPlace(nn.Module):
    """A child of a child changes the input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.block = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))

    def forward(self, x: Any) -> Any:
        y = self.a(x).view(*x.shape[:-1], -1, 8)
        self.block(x)
        return y, self.b(x).view(*x.shape[:-1], -1, 8)
