"""Products below autograd and autocast: by the library's kernels, or by torch's own kernel of the same operator.

torch's kernel is called through the operator's ``out=`` form. This package never replaces that form, so its kernels in
:mod:`outblas.dispatch.aten_override` cannot call themselves. A Python kernel that another package registered for
``aten::mm`` is bypassed while this package's kernels are installed, even for products that torch computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from outblas.dispatch.call_option import CallOption
from outblas.dispatch.product import run_below_autograd
from outblas.dispatch.product_operands import fold, unfold

if TYPE_CHECKING:
    from outblas.dispatch.aten_native import NativeCall

HALF_DTYPES = (torch.float16, torch.bfloat16)


def our_mm(a: torch.Tensor, b: torch.Tensor, option: CallOption, call: NativeCall | None = None) -> torch.Tensor | None:
    """Compute a product of two half-precision matrices. Return None if torch must compute it.

    Example: fp32 matrices, a batch, and matrices on a CPU give None.

    Args:
        a: (M, K), fp16 or bf16.
        b: (K, N).
        option: index of the launch option: 0 plain, 1 PDL, 2 constant weights.
        call: the call if C++ asked, which then learns the answer; None otherwise.
    """
    return run_below_autograd(a, b, option, call) if a.dtype in HALF_DTYPES and a.dim() == 2 == b.dim() else None


def our_bmm(
    a: torch.Tensor, b: torch.Tensor, option: CallOption, call: NativeCall | None = None
) -> torch.Tensor | None:
    """Compute a batched product that is one product of two matrices: a batch of 1, or one ``b`` for all.

    Return (B, M, N), or None if torch must compute it. The arguments are those of :func:`our_mm`, but (B, M, K) and
    (B, K, N). One ``b`` for all means that its stride along B is 0, as ``expand`` makes it.
    """
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
    """Call torch's own kernel of ``aten::mm``; raise torch's errors."""
    return _unwatched(torch.mm, (a, b), (a.shape[0], b.shape[1]) if a.dim() == 2 == b.dim() else (0,))


def torch_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Call torch's own kernel of ``aten::bmm``; raise torch's errors."""
    return _unwatched(torch.bmm, (a, b), (*a.shape[:2], b.shape[2]) if a.dim() == 3 == b.dim() else (0,))


def torch_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any) -> torch.Tensor:
    """Call torch's own kernel of ``aten::addmm``, which adds the bias before it rounds; raise torch's errors.

    Call it below autograd or under ``torch.no_grad()``: operands that require a gradient raise RuntimeError otherwise.

    Args:
        bias: (N), or any shape that torch accepts.
        a: (M, K).
        b: (K, N).
        factors: torch's ``beta`` and ``alpha``.
    """
    shape = (a.shape[0], b.shape[1]) if a.dim() == 2 == b.dim() else (0,)
    return _unwatched(functools.partial(torch.addmm, **factors), (bias, a, b), shape)


def torch_baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any) -> torch.Tensor:
    """Call torch's own kernel of ``aten::baddbmm``, as :func:`torch_addmm` does for ``aten::addmm``."""
    shape = (*a.shape[:2], b.shape[2]) if a.dim() == 3 == b.dim() else (0,)
    return _unwatched(functools.partial(torch.baddbmm, **factors), (bias, a, b), shape)


def _unwatched(form: Callable[..., Any], operands: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Call an operator's ``out=`` form with a new output of ``shape``.

    Function modes do not see this call: they have seen the one above.
    """
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return form(*operands, out=operands[-1].new_empty(shape))
    return form(*operands, out=torch.empty(shape, dtype=operands[-1].dtype, device=operands[-1].device))
