"""A product is folded once and asked about once on its way, with and without a gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import outblas
from outblas.dispatch import aten_products, autograd, matmul, product
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the questions whether torch computes a product, and the foldings of operands."""
    counts: Counter[str] = Counter()
    for module in (autograd, aten_products, matmul, product):
        for name in ("why_left_to_torch", "fold"):
            original = getattr(module, name, None)
            if original is not None:

                def counting(*operands: Any, name: str = name, original: Any = original) -> Any:
                    counts[name] += 1
                    return original(*operands)

                monkeypatch.setattr(module, name, counting)
    return counts


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_the_forward_product(rows: tuple[int, ...], grad: bool, served: Served, counted: Counter[str]) -> None:
    a, b = numbers(*rows, 8, grad=grad), numbers(8, 4)
    c = outblas.matmul(a, b)
    assert len(served.ran) == 1 and c.requires_grad is grad and c.equal(a @ b)
    assert counted == {"why_left_to_torch": 1, "fold": 1}


def test_each_product_of_the_gradients(served: Served, counted: Counter[str]) -> None:
    a, b = numbers(6, 8, grad=True), numbers(8, 4, grad=True)
    c = outblas.matmul(a, b)
    counted.clear()
    c.backward(numbers(6, 4))
    assert counted == {"why_left_to_torch": 2}, "nothing is folded: both are products of matrices"
