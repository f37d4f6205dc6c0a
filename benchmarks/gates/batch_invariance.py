"""The gate of batch-invariant products: a row of A gives the same bits of C in every batch, at every place.

The rows of one large product are the reference. Drawn batches are made of drawn rows in drawn order, so that a row
comes with other rows, in other numbers, at other places. Every element of C is compared bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.operands import torch_dtype
from outblas.judge.reference import b_as_k_by_n

#: Largest batch of the gate, rows.
MOST_ROWS = 8192
#: Batches at which kernels change: one row, rows of tiles and of gemv kernels, and their neighbours.
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257, 512, 1000)


def drawn_batches(count: int, seed: int, most: int = MOST_ROWS) -> list[int]:
    """Return the numbers of rows to try: those of :data:`EDGES`, the largest, and log-uniformly drawn ones.

    Args:
        most: largest number of rows, 1 or more.
    """
    rng = random.Random(seed)
    drawn = (round(most ** rng.random()) for _ in range(count))
    return sorted({m for m in (*EDGES, most, *drawn) if m <= most})


def check_batch_invariance(
    product: Callable[[Any, Any], Any], weight: Problem, batches: Sequence[int], device: str = "cuda", seed: int = 0
) -> Verdict:
    """Compare the rows of products of many batches with those of the largest one, bit by bit.

    Args:
        product: returns the product of (M, K) and (K, N) tensors.
        weight: gives N, K, layout and dtype; its M does not matter.
        batches: numbers of rows, at least two different ones.

    Returns:
        PASSED, or NOT_REPEATABLE with the first batch that differs, the number of its rows that do, and the first of
            them. The only gate in the verdict is ``batch_invariance``.

    Raises:
        UsageError: fewer than two different batches, which cannot differ.
    """
    import torch

    if len(set(batches)) < 2:
        raise UsageError(f"batches is {sorted(set(batches))}", "at least two different sizes", "pass more batch sizes")
    generator = torch.Generator(device).manual_seed(seed)
    dtype, most = torch_dtype(weight), max(batches)
    a = torch.randn(most, weight.k, device=device, generator=generator).to(dtype)
    b = b_as_k_by_n(weight, torch.randn(*weight.b_shape, device=device, generator=generator).to(dtype))
    whole = product(a, b).view(torch.int16)
    for rows in batches:
        chosen = torch.randperm(most, device=device, generator=generator)[:rows]
        differs = (product(a[chosen], b).view(torch.int16) != whole[chosen]).any(dim=1)
        count = int(differs.sum())
        if count:
            place = int(differs.nonzero()[0, 0])
            detail = (
                f"in a batch of {rows} rows, {count} differ from the same rows in a batch of {most}; "
                f"the first is row {place}, which is row {int(chosen[place])} there"
            )
            return Verdict(Status.NOT_REPEATABLE, (), detail)
    return Verdict(Status.PASSED, ("batch_invariance",), "")
