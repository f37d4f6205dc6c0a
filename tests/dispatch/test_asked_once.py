"""A product is folded, read and asked about once on its way, with and without a gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import outblas  # noqa: E402
from outblas.dispatch import aten_products, autograd, matmul, product, product_operands  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the questions whether torch computes a product, the foldings, and the readings of a tensor's properties."""
    counts: Counter[str] = Counter()
    for module in (autograd, aten_products, matmul, product, product_operands):
        for name in ("why_left_to_torch", "fold", "is_half", "operand"):
            original = getattr(module, name, None)
            if original is not None:

                def counting(*operands: Any, name: str = name, original: Any = original) -> Any:
                    counts[name] += 1
                    return original(*operands)

                monkeypatch.setattr(module, name, counting)
    return counts


def aligned(*shape: int) -> Any:
    """Whole numbers at an address that is a multiple of 16 bytes."""
    found = numbers(*shape)
    assert found.data_ptr() % 16 == 0
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_the_forward_product(rows: tuple[int, ...], grad: bool, served: Served, counted: Counter[str]) -> None:
    a, b = numbers(*rows, 8, grad=grad), numbers(8, 4)
    c = outblas.matmul(a, b)
    assert len(served.ran) == 1 and c.requires_grad is grad and c.equal(a @ b)
    assert counted == {"why_left_to_torch": 1, "fold": 1, "operand": 2, **({"is_half": 1} if grad else {})}


def test_a_batch_invariant_product(served: Served, counted: Counter[str]) -> None:
    a, b = aligned(2, 3, 8), aligned(8, 8)
    c = outblas.matmul(a, b, batch_invariant=True)
    assert len(served.ran) == 1 and c.equal(a @ b)
    assert counted == {"why_left_to_torch": 1, "fold": 1, "operand": 2}, "nothing is copied: both lie well"


def test_each_product_of_the_gradients(served: Served, counted: Counter[str]) -> None:
    a, b = numbers(6, 8, grad=True), numbers(8, 4, grad=True)
    c = outblas.matmul(a, b)
    counted.clear()
    c.backward(numbers(6, 4))
    expected = {"why_left_to_torch": 2, "operand": 4}
    assert counted == expected, "nothing is folded: both are products of matrices"
