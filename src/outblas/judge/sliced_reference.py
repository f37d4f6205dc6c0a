"""A reference that is computed block by block, so that a running program is never held up for long.

Unlike :class:`outblas.judge.reference.Reference` it changes none of torch's settings, which other threads read: all of
it is fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outblas.core.problem import Problem
from outblas.judge.operands import torch_dtype
from outblas.judge.reference import Reference, b_as_k_by_n, error_bound

#: Memory of a block's operands in fp64, with their magnitudes, bytes.
BLOCK_BYTES = 16 * 2**20
#: fp64 numbers of an operand's element that a block holds: its value and its magnitude.
_BYTES_PER_ELEMENT = 16
#: One over the allowed error of an exact result: any error of a half-precision number exceeds it.
_EXACT = 2.0**40


class SlicedReference(Reference):
    """Reference and bound of one (A, B) with fp32 accumulation, complete after :meth:`blocks` has ended.

    Args:
        problem: the problem.
        a: (M, K), on any device.
        b: B as stored, on the same device.
        exact: allow no error: every element must equal the rounded product.
    """

    def __init__(self, problem: Problem, a: Any, b: Any, exact: bool) -> None:
        import torch

        self.problem, self._a, self._b, self._is_exact = problem, a, b, exact
        self.reference = torch.empty((problem.m, problem.n), dtype=torch.float32, device=a.device)
        self._inverse = torch.full_like(self.reference, _EXACT)
        self._rows = problem.m

    def blocks(self, max_flop: float) -> Iterator[None]:
        """Compute the reference; yield after each block.

        Args:
            max_flop: floating-point operations of a block, at most; at least one row by one column is computed.
        """
        height, width = block_extents(self.problem, max_flop)
        for row in range(0, self.problem.m, height):
            for column in range(0, self.problem.n, width):
                self._block(slice(row, row + height), slice(column, column + width))
                yield

    def _block(self, rows: slice, columns: slice) -> None:
        import torch

        x, y = self._a[rows].double(), b_as_k_by_n(self.problem, self._b)[:, columns].double()
        product = torch.empty((x.shape[0], y.shape[1]), dtype=x.dtype, device=x.device)
        torch.mm(x, y, out=product)  # the form that enable() never replaces
        if self._is_exact:
            self.reference[rows, columns] = product.to(torch_dtype(self.problem))
            return
        magnitude = torch.mm(x.abs_(), y.abs_(), out=torch.empty_like(product))
        self.reference[rows, columns] = product
        self._inverse[rows, columns] = error_bound(self.problem, product, magnitude).reciprocal_()


def block_extents(problem: Problem, max_flop: float) -> tuple[int, int]:
    """Return (rows, columns) of a block within ``BLOCK_BYTES`` and ``max_flop``, each at least 1.

    Args:
        problem: the problem.
        max_flop: floating-point operations of a block, at most; two products of 2 K for each element.
    """
    side, elements = BLOCK_BYTES // (_BYTES_PER_ELEMENT * problem.k), int(max_flop / (4 * problem.k))
    rows = max(1, min(problem.m, side // 2, elements))
    return rows, max(1, min(problem.n, side - rows, elements // rows))
