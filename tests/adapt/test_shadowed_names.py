"""``outblas.optimize`` reads local names that shadow a module's: of imports, functions, errors and patterns."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import silu  # noqa: E402

import outblas  # noqa: E402
from support.models.decoder_blocks import rows  # noqa: E402


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)


class Imports(Layer):
    def forward(self, x: Any) -> Any:
        from torch import relu as silu

        return silu(self.layer(x))


class Defines(Layer):
    def forward(self, x: Any) -> Any:
        def silu(y: Any) -> Any:
            return y.relu()

        return silu(self.layer(x))


class Names(Layer):
    def forward(self, x: Any) -> Any:
        y = (silu := torch.relu)(self.layer(x))
        return silu(self.layer(y))


class Catches(Layer):
    def forward(self, x: Any) -> Any:
        class Relu(Exception):
            def __call__(self, y: Any) -> Any:
                return y.relu()

        try:
            raise Relu
        except Relu as silu:
            return silu(self.layer(x))


class Matches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Any, y: Any) -> Any:
        q = self.q(x).view(*x.shape[:-1], -1, 4)
        match y:
            case x:
                pass
        return q, self.k(x).view(*x.shape[:-1], -1, 4)


class Plain(Layer):
    def forward(self, x: Any) -> Any:
        return silu(self.layer(x))


@pytest.mark.parametrize("kind", [Imports, Defines, Names, Catches])
def test_a_local_name_is_not_the_activation_of_the_module(kind: type[Layer]) -> None:
    module, x = kind().to(torch.bfloat16).eval(), rows(2, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = module(x)
        report = outblas.optimize(module)
        assert torch.equal(module(x), wanted) and report.fused == []


def test_the_activation_of_the_module_is_found() -> None:
    assert outblas.optimize(Plain().to(torch.bfloat16).eval()).fused == ["the model: silu(layer)"]


def test_a_name_that_a_pattern_sets_is_another_input() -> None:
    module = Matches().to(torch.bfloat16).eval()
    x, y = rows(2, dtype=torch.bfloat16), rows(3, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = module(x, y)
        report = outblas.optimize(module)
        found = module(x, y)
    assert report.merged == [] and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
