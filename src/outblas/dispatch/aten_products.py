"""Products below autograd and autocast, where torch calls kernels: ours, else torch's own kernel of the same operator.

torch's own is reached by the operator's ``out=`` form, whose kernel is the same one: nothing of ours is ever registered
for that, so that our kernels of :mod:`outblas.dispatch.aten_override` never meet themselves.

A Python kernel that another package has registered for ``aten::mm`` itself is thereby bypassed while ours are in
place, for products that are not ours, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from outblas.dispatch.fold import fold, unfold
from outblas.dispatch.product import run_below_autograd

if TYPE_CHECKING:
    from outblas.dispatch.aten_native import NativeCall

HALF_DTYPES = (torch.float16, torch.bfloat16)


def our_mm(a: torch.Tensor, b: torch.Tensor, option: int, call: NativeCall | None = None) -> torch.Tensor | None:
    """Our product of two matrices, None where torch is to compute it. ``option``, ``call``: see
    :func:`outblas.dispatch.product.run_below_autograd`."""
    return run_below_autograd(a, b, option, call) if a.dtype in HALF_DTYPES and a.dim() == 2 == b.dim() else None


def our_bmm(a: torch.Tensor, b: torch.Tensor, option: int, call: NativeCall | None = None) -> torch.Tensor | None:
    """Our product of two batches of matrices where it is one of two matrices: a batch of one, or one ``b`` for all."""
    if a.dtype not in HALF_DTYPES or a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0]:
        return None
    if a.shape[0] != 1 and b.stride(0) != 0:
        return None
    folded = fold(a, b[:1])
    if folded is None:  # torch's by its shapes and strides, whatever the library says
        if call is not None:
            call.learn(a.element_size(), None, None)
        return None
    c = run_below_autograd(folded.a, folded.b, option, call)
    return None if c is None else unfold(c, folded.shape)


def torch_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's own kernel of ``aten::mm``, and its errors."""
    return _unwatched(torch.mm, (a, b), (a.shape[0], b.shape[1]) if a.dim() == 2 == b.dim() else (0,))


def torch_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's own kernel of ``aten::bmm``, and its errors."""
    return _unwatched(torch.bmm, (a, b), (*a.shape[:2], b.shape[2]) if a.dim() == 3 == b.dim() else (0,))


def torch_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's own kernel of ``aten::addmm``, which adds the bias before it rounds, and its errors."""
    return _unwatched(torch.addmm, (bias, a, b), (a.shape[0], b.shape[1]) if a.dim() == 2 == b.dim() else (0,))


def _unwatched(form: Callable[..., Any], operands: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """An operator by its ``out=`` form, as if it were the operator: function modes have seen the call above."""
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return form(*operands, out=operands[-1].new_empty(shape))
    return form(*operands, out=torch.empty(shape, dtype=operands[-1].dtype, device=operands[-1].device))
