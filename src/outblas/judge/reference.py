"""Reference result of a product, and the error that a correct kernel may have.

C is the reference, K the depth, and u the unit roundoff of the output (fp16: 2^-11, bf16: 2^-8). The error s is that of
results near zero. In fp16 it is half the smallest subnormal, 2^-25. In bf16 it is 2^-126, fp32's smallest normal, below
which an accumulator may flush to zero.

- fp32 accumulation:  |err| <= u |C| + c sqrt(K) 2^-24 (|A| |B|) + s,                    c = ERROR_C = 4
- fp16 accumulation:  |err| <= u |C| + c sqrt(S) 2^-11 (|C| + Q) + (S + 1) s,  S = ceil(K / 16),  c = FP16_C = 8

Rounding errors of a sum of K terms grow as sqrt(K) (Higham & Mary, A new approach to probabilistic
rounding error analysis, 2019). Tensor cores truncate when they align and add. On signed terms
that is a small part of the bound. On terms of one sign it is a bias linear in K, so positive inputs have only 1,024
terms. A half accumulator in place of an fp32 one has an error of about sqrt(K / 16) 2^-12 |partial sum|, which exceeds
the bound. Q = sqrt((A o A)(B o B)) is the size of partial sums with random signs. The fp16 bound is wide because an
fp16 accumulator is inexact. :func:`needed_c` returns the c that a result needs, to calibrate on cuBLAS itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from outblas.core.problem import Problem
from outblas.judge.operands import torch_dtype

ERROR_C, FP16_C = 4.0, 8.0
UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST_STEP = {"fp16": 2.0**-25, "bf16": 2.0**-126}
#: FLOP up to which the whole reference is fp64; above, fp32 in blocks of K with sampled rows in fp64.
FP64_FLOPS = 2**37
_K_BLOCK, _FP64_ROWS, _CHUNK = 512, 32, 2**26


def error_bound(problem: Problem, reference: Any, magnitude: Any, q: Any = None, c: float | None = None) -> Any:
    """Return the largest allowed |error| of every element of C, by the formula of the module's text.

    Args:
        reference: the exact product, a tensor (M, N) in fp32 or fp64; the result is like it.
        magnitude: |A| |B|, (M, N).
        q: sqrt((A o A)(B o B)), (M, N); needed for fp16 accumulation only.
        c: the formula's constant; None: 4 for fp32 accumulation, 8 for fp16.
    """
    result = UNIT_ROUNDOFF[problem.dtype] * reference.abs() + SMALLEST_STEP[problem.dtype]
    if problem.acc == "fp32":
        return result + (ERROR_C if c is None else c) * math.sqrt(problem.k) * 2.0**-24 * magnitude
    steps = math.ceil(problem.k / 16)
    result = result + steps * SMALLEST_STEP[problem.dtype]
    return result + (FP16_C if c is None else c) * math.sqrt(steps) * 2.0**-11 * (reference.abs() + q)


def b_as_k_by_n(problem: Problem, b: Any) -> Any:
    """Return B as a (K, N) view: ``b.t()`` for layout TN, ``b`` itself for NN. Writing to it changes ``b``."""
    return b.t() if problem.layout == "TN" else b


def fp64_product(problem: Problem, a: Any, b: Any) -> Any:
    """Return the product A B, an (M, N) tensor in fp64.

    Args:
        problem: gives the layout of B.
        a: (M, K), of any dtype.
        b: B as stored (``problem.b_shape``).
    """
    return a.double() @ b_as_k_by_n(problem, b).double()


def magnitudes(problem: Problem, a: Any, b: Any) -> tuple[Any, Any]:
    """Return (|A| |B|, Q), both (M, N) in fp32, with Q = sqrt((A o A)(B o B)). They may be off by one per cent.

    Q is None unless the problem's accumulator is fp16.

    Args:
        a: (M, K).
        b: B as stored.
    """
    with allow_tf32(True):
        x, y = a.float(), b_as_k_by_n(problem, b).float()
        q = ((x * x) @ (y * y)).sqrt() if problem.acc == "fp16" else None
        return x.abs() @ y.abs(), q


class Reference:
    """Reference and bound of one (A, B), made once and used for every candidate.

    It needs 8 bytes per element of C. Later changes of A and B do not matter.

    Args:
        a: (M, K), on any device.
        b: B as stored, on the same device.

    Attributes:
        reference: the product, (M, N) in fp32.
    """

    def __init__(self, problem: Problem, a: Any, b: Any) -> None:
        self.problem = problem
        self.reference = _reference(problem, a, b).float()
        magnitude, q = magnitudes(problem, a, b)
        self._inverse = error_bound(problem, self.reference, magnitude, q).reciprocal_()
        self._rows = max(1, min(problem.m, _CHUNK // problem.n))

    @property
    def nbytes(self) -> int:
        return int(self.reference.nbytes + self._inverse.nbytes)

    def worst_error_ratio(self, c: Any) -> Any:
        """Return the largest |error| / bound of C: a 0-dim fp32 tensor. At most 1 is right; NaN if C holds a NaN.

        It does not wait for the GPU.

        Args:
            c: what a kernel wrote, (M, N), on the device of the reference.
        """
        import torch

        worst, scratch = None, torch.empty_like(self.reference[: self._rows])
        for first in range(0, self.problem.m, self._rows):
            part = slice(first, min(first + self._rows, self.problem.m))
            ratio = scratch[: part.stop - first]
            torch.sub(c[part], self.reference[part], out=ratio)
            low, high = torch.aminmax(ratio.mul_(self._inverse[part]))
            most = torch.maximum(high, -low)
            worst = most if worst is None else torch.maximum(worst, most)
        return worst


def _reference(problem: Problem, a: Any, b: Any) -> Any:
    import torch

    y = b_as_k_by_n(problem, b)
    rows = max(1, _CHUNK // max(problem.k, problem.n))
    if problem.flops <= FP64_FLOPS:
        wide = y.double()
        return torch.cat([(a[i : i + rows].double() @ wide).float() for i in range(0, problem.m, rows)])
    out = torch.zeros((problem.m, problem.n), dtype=torch.float32, device=a.device)
    with allow_tf32(False):
        for k in range(0, problem.k, _K_BLOCK):
            out.addmm_(a[:, k : k + _K_BLOCK].float(), y[k : k + _K_BLOCK].float())
    step = max(1, problem.m // _FP64_ROWS)
    out[::step] = (a[::step].double() @ y.double()).float()
    return out


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Set for a ``with`` block whether torch may use TF32 for fp32 products on a GPU, then restore the setting.

    Products of fp16 values are exact in TF32, and so are those of bf16.
    """
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = allowed
    try:
        yield
    finally:
        settings.allow_tf32 = before


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
