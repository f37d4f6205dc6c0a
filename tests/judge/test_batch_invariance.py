"""The gate of batch-invariant products, on CPU products that keep it and on some that break it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from gates.batch_invariance import EDGES, check_batch_invariance, drawn_batches  # noqa: E402

from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402

WEIGHT = Problem(1, 24, 64, "TN", "bf16")
BATCHES = (1, 3, 40, 64)


def right(a: Any, b: Any) -> Any:
    return (a.double() @ b.double()).to(a.dtype)


def verdict(product: Any, weight: Problem = WEIGHT) -> Any:
    return check_batch_invariance(product, weight, BATCHES, "cpu")


@pytest.mark.parametrize("weight", [WEIGHT, Problem(1, 7, 33, "NN", "fp16")])
def test_a_product_that_does_not_depend_on_the_batch_passes(weight: Problem) -> None:
    found = verdict(right, weight)
    assert found.status is Status.PASSED and found.gates == ("batch_invariance",)


def split_below(rows: int) -> Any:
    """A product that adds two parts of K, each rounded, in small batches."""

    def product(a: Any, b: Any) -> Any:
        half = a.shape[1] // 2
        parts = right(a[:, :half], b[:half]) + right(a[:, half:], b[half:])
        return parts if len(a) < rows else right(a, b)

    return product


def by_place(a: Any, b: Any) -> Any:
    c = right(a, b)
    c.view(torch.int16)[2:3] ^= 1
    return c


def minus_zero(a: Any, b: Any) -> Any:
    c = torch.zeros(len(a), b.shape[1], dtype=a.dtype)
    return -c if len(a) == 3 else c


def larger(a: Any, b: Any) -> Any:
    return torch.full((len(a), b.shape[1]), float(len(a) == 3), dtype=a.dtype)


@pytest.mark.parametrize(
    ("product", "said"),
    [
        (larger, "in a batch of 3 rows, 3 differ"),
        (split_below(64), "in a batch of 1 rows"),
        (split_below(2), "in a batch of 1 rows, 1 differ"),
        (by_place, "in a batch of 3 rows"),
        (minus_zero, "in a batch of 3 rows, 3 differ from the same rows in a batch of 64; the first is row 0"),
    ],
)
def test_a_product_that_depends_on_it_fails_in_some_bit(product: Any, said: str) -> None:
    found = verdict(product)
    assert found.status is Status.NOT_REPEATABLE and said in found.detail and not found.gates


def test_batches_are_the_edges_the_largest_and_drawn_ones() -> None:
    drawn = drawn_batches(20, 0)
    assert set(EDGES) < set(drawn) and max(drawn) == 8192 and drawn == drawn_batches(20, 0) != drawn_batches(20, 1)
    assert max(drawn_batches(20, 0, 100)) == 100
    with pytest.raises(UsageError, match="at least two different sizes"):
        check_batch_invariance(right, WEIGHT, [4, 4], "cpu")
