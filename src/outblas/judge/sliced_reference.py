"""A reference that is computed block by block, so that a running program is never held up for long.

Unlike :class:`outblas.judge.reference.Reference` it changes none of torch's settings, which other threads read: all of
it is fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from outblas.core.problem import Problem
from outblas.judge.operands import torch_dtype
from outblas.judge.reference import Reference, b_as_k_by_n, error_bound

#: Memory of a block's operands and sums in fp64 where none is named, bytes.
BLOCK_BYTES = 16 * 2**20
#: Bytes of an operand's element in a block: twice its number, as torch may copy it. And of an element of C: both sums.
_BYTES_PER_ELEMENT = 16
#: The most of a block's memory that its sums take: the rest is left for K. And the most of its columns.
_PART_OF_RESULTS, _MOST_COLUMNS = 4, 2**12
#: The least part of K that a step should have; slow GPUs get fewer elements of C for it.
_LEAST_DEPTH = 64
#: One over the allowed error of an exact result: any error of a half-precision number exceeds it.
_EXACT = 2.0**40


class SlicedReference(Reference):
    """Reference and bound of one (A, B) with fp32 accumulation, complete after :meth:`blocks` has ended.

    It needs 8 bytes per element of C, and at most twice ``block_bytes``.

    Args:
        a: (M, K), on any device.
        b: B as stored, on the same device.
        exact: allow no error: every element must equal the rounded product.
        block_bytes: memory of a block's operands and sums in fp64.
    """

    def __init__(self, problem: Problem, a: Any, b: Any, exact: bool, block_bytes: int = BLOCK_BYTES) -> None:
        import torch

        self.problem, self._a, self._b, self._is_exact = problem, a, b, exact
        self._block_bytes = block_bytes
        self.reference = torch.empty((problem.m, problem.n), dtype=torch.float32, device=a.device)
        self._inverse = torch.full_like(self.reference, _EXACT)
        self._rows = max(1, min(problem.m, BLOCK_BYTES // (4 * problem.n)))

    def blocks(self, max_flop: float) -> Iterator[None]:
        """Compute the reference; yield after each step.

        Args:
            max_flop: floating-point operations of a step, at most; it has at least one row, column and term.
        """
        height, width, depth = block_extents(self.problem, max_flop, self._block_bytes)
        for row in range(0, self.problem.m, height):
            for column in range(0, self.problem.n, width):
                yield from self._block(slice(row, row + height), slice(column, column + width), depth)

    def _block(self, rows: slice, columns: slice, depth: int) -> Iterator[None]:
        """Compute a block of C, the sum of its steps along K."""
        import torch

        x, y = self._a[rows], b_as_k_by_n(self.problem, self._b)[:, columns]
        product = torch.zeros((x.shape[0], y.shape[1]), dtype=torch.float64, device=x.device)
        magnitude = None if self._is_exact else torch.zeros_like(product)
        for k in range(0, self.problem.k, depth):
            left, right = x[:, k : k + depth].double(), y[k : k + depth].double()
            # Its results are summed in place, in the form that enable() never replaces.
            torch.addmm(product, left, right, out=product)
            if magnitude is not None:
                torch.addmm(magnitude, left.abs_(), right.abs_(), out=magnitude)
            if k + depth < self.problem.k:
                yield
        if magnitude is None:
            self.reference[rows, columns] = product.to(torch_dtype(self.problem))
        else:
            self.reference[rows, columns] = product
            self._inverse[rows, columns] = error_bound(self.problem, product, magnitude).reciprocal_()
        yield


def block_extents(problem: Problem, max_flop: float, block_bytes: int = BLOCK_BYTES) -> tuple[int, int, int]:
    """Return (rows, columns, depth) of a step within ``block_bytes`` and ``max_flop``, each at least 1.

    Args:
        max_flop: floating-point operations of a step, at most; two products of 2 ``depth`` for each element.
    """
    elements = block_bytes // _BYTES_PER_ELEMENT
    results = max(1, min(elements // _PART_OF_RESULTS, int(max_flop / (4 * min(problem.k, _LEAST_DEPTH)))))
    rows = min(problem.m, max(math.isqrt(results), results // min(problem.n, _MOST_COLUMNS)))
    columns = min(problem.n, _MOST_COLUMNS, results // rows)
    left = elements - rows * columns
    return rows, columns, max(1, min(problem.k, left // (rows + columns), int(max_flop / (4 * rows * columns))))
