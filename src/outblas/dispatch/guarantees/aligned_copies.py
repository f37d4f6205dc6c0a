"""Batch-invariant products of operands that no kernel takes as they lie, and the refusal of all others.

A kernel of the weight's order needs rows without gaps and addresses that are multiples of 16 bytes. Torch's own kernel
would add in another order. So other operands are copied, and the kernel is the same as for operands that lie well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from outblas.core.errors import DeviceError
from outblas.core.problem import ROW_ALIGN_BYTES, row_major
from outblas.dispatch.decide import Operand, why_not_half_gemm
from outblas.dispatch.tensors import operand

if TYPE_CHECKING:
    import torch


def by_copies(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None],
) -> torch.Tensor | None:
    """Compute ``a @ b`` on copies of the operands that do not lie as kernels need. Return None if all do.

    Args:
        a: (M, K).
        b: (K, N).
        out: (M, N), the output, which is returned; None: a new tensor.
        product: computes the product of operands that lie as kernels need.
    """
    if is_not_half_gemm(a, b, out):
        return None
    ready = _lies_well(a), _lies_well(b, b.t()), out is None or _lies_well(out)
    if all(ready):
        return None
    import torch

    a = a if ready[0] else _copied(a)
    b = b if ready[1] else _copied(b.t()).t() if _has_rows(b.t()) else _copied(b)
    result = product(a, b, out if ready[2] else None)
    if ready[2] or out is None or result is None:
        return result
    with torch.no_grad():
        return out.copy_(result)


def as_copied(a: Operand, b: Operand, out: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Return the operands as :func:`by_copies` gives them to a kernel: with rows without gaps, at aligned addresses."""
    stored = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    if len(b.shape) == 2 and not row_major(b.shape, b.strides) and row_major(stored.shape, stored.strides):
        return _moved(a), b._replace(offset=0), None if out is None else _moved(out)
    return _moved(a), _moved(b), None if out is None else _moved(out)


def _moved(operand: Operand) -> Operand:
    return operand._replace(strides=(*operand.shape[1:], 1), offset=0)


def is_not_half_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Return True for operands of which torch makes zeros or an error, and which have no order of summation."""
    return bool(why_not_half_gemm(operand(a), operand(b), None if out is None else operand(out)))


def refuse(shape: str, reason: str) -> NoReturn:
    """Raise DeviceError for a half-precision product that no kernel can compute with ``batch_invariant``.

    Args:
        shape: the product, for the message.
        reason: why no kernel can compute it.
    """
    raise DeviceError(
        f"no kernel computes {shape} with batch_invariant: {reason}",
        "a kernel of the weight's order of summation",
        "run such a product once before a capture, see outblas.explain, or leave batch_invariant out",
    )


def _lies_well(*views: torch.Tensor) -> bool:
    """Return True if one of the views of a matrix has rows without gaps, at an aligned address."""
    return views[0].data_ptr() % ROW_ALIGN_BYTES == 0 and any(_has_rows(view) for view in views)


def _has_rows(matrix: torch.Tensor) -> bool:
    return row_major(tuple(matrix.shape), matrix.stride())


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    import torch

    return matrix.clone(memory_format=torch.contiguous_format)
