"""Gradients of a product: products again, decided like any other.

They are of the operands as they are stored: a transpose is a view, and which layout it is the decision reads off its
strides. Where an operand is stored by columns its gradient is made so, too, as torch does (``mm_mat1_grad`` and
``mm_mat2_grad`` in torch's ``FunctionsManual.cpp``). All can be differentiated again.

The functions here are for eager calls: they cost the host a third of what the operators of
:mod:`outblas.dispatch.torch_op` do, which torch.compile needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch.aten_products import our_mm, torch_addmm, torch_mm
from outblas.dispatch.call_option import CallOption, option_without_promise
from outblas.dispatch.product import run_product
from outblas.dispatch.product_operands import has_memory
from outblas.runtime.full_precision import full_precision_reductions


def compute_mm(a: torch.Tensor, b: torch.Tensor, option: CallOption | None = None) -> torch.Tensor:
    """Return the product of (M, K) and (K, N), by a kernel of the library or by torch's own; autograd does not record
    it.

    Call it below autograd or under ``torch.no_grad()``: operands that require a gradient may raise RuntimeError
    otherwise.
    Operands that do not fit raise torch.mm's errors.

    Args:
        a: (M, K).
        b: (K, N).
        option: as for :func:`outblas.dispatch.product.decide_and_run`; None: without a promise.
    """
    option = option_without_promise() if option is None else option
    result = our_mm(a, b, option)
    return _torch_mm(a, b, option) if result is None else result


def multiply(a: torch.Tensor, b: torch.Tensor, option: CallOption | None = None) -> torch.Tensor:
    """Compute as :func:`compute_mm`, with gradients: the result has a ``grad_fn`` if an operand requires a gradient.

    torch.mm does it instead within torch.func, while torch.compile traces, or for tensors without memory, such as a
    batch of gradients.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return torch.mm(a, b)
    if not has_memory(a) or not has_memory(b):
        return torch.mm(a, b)
    return ProductFunction.apply(a, b, False, option) if torch.is_grad_enabled() else compute_mm(a, b, option)


def _torch_mm(a: torch.Tensor, b: torch.Tensor, option: CallOption) -> torch.Tensor:
    """Call torch's own kernel, with fp32 sums if the option guarantees them."""
    if option.guarantee == "none":
        return torch_mm(a, b)
    with full_precision_reductions():
        return torch_mm(a, b)


def save_operands(ctx: Any, a: torch.Tensor, b: torch.Tensor, wants: tuple[bool, bool]) -> None:
    """Save in ``ctx`` the operands that the wanted gradients need, and no other; ``ctx.by_columns`` says how each is
    stored.

    Example: with ``wants=(True, False)``, ``ctx.saved_tensors`` is ``(None, b)``.

    Args:
        a: first operand; saved if ``b``'s gradient is wanted, else None is saved.
        b: second operand; saved if ``a``'s gradient is wanted, else None is saved.
        wants: whether the gradients of ``a`` and of ``b`` are wanted.
    """
    ctx.by_columns = _is_by_columns(a), _is_by_columns(b)
    ctx.save_for_backward(a if wants[1] else None, b if wants[0] else None)


def gradients(
    ctx: Any, grad: torch.Tensor, wants: tuple[bool, bool], mm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of (a, b) as a tuple; None for each one that is not wanted.

    They are ``mm(grad, b.t())`` and ``mm(a.t(), grad)``, or the transposes of products that give the same.

    Args:
        ctx: context in which :func:`save_operands` has saved the operands.
        grad: gradient of the product, (M, N).
        wants: whether the gradients of ``a`` and of ``b`` are wanted.
        mm: function of two matrices that returns their product, e.g. ``torch.mm``.
    """
    a, b = ctx.saved_tensors
    grad_a = grad_b = None
    if wants[0]:
        grad_a = mm(b, grad.t()).t() if ctx.by_columns[0] else mm(grad, b.t())
    if wants[1]:
        grad_b = mm(grad.t(), a).t() if ctx.by_columns[1] else mm(a.t(), grad)
    return grad_a, grad_b


def _is_by_columns(t: torch.Tensor) -> bool:
    """Return True if torch would make the gradient of ``t`` by columns; the same test as torch's."""
    return bool(t.stride(0) == 1 and t.stride(1) == t.shape[0])


class ProductFunction(torch.autograd.Function):  # type: ignore[misc]
    """The autograd function of ``a @ b`` for two matrices.

    ``ProductFunction.apply(a, b, asked, option)`` returns the product, (M, N). ``asked`` is True if
    :func:`outblas.dispatch.product_operands.why_left_to_torch` has named a wanted gradient alone; False asks again.
    ``option`` is that of :func:`compute_mm`, and holds for the gradients, too.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, asked: bool, option: CallOption | None) -> torch.Tensor:
        ctx.option = option_without_promise() if option is None else option
        save_operands(ctx, a, b, ctx.needs_input_grad[:2])
        if not asked:
            return compute_mm(a, b, ctx.option)
        result = run_product(a, b, None, ctx.option)
        return _torch_mm(a, b, ctx.option) if result is None else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        product = functools.partial(multiply, option=ctx.option)
        return *gradients(ctx, grad, ctx.needs_input_grad[:2], product), None, None


class BiasedProductFunction(torch.autograd.Function):  # type: ignore[misc]
    """The autograd function of ``bias + a @ b``, rounded as torch.addmm does.

    ``BiasedProductFunction.apply(bias, a, b)`` takes shapes (N), (M, K) and (K, N), and returns (M, N).
    """

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        save_operands(ctx, a, b, ctx.needs_input_grad[1:])
        return torch_addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_bias = grad.sum(0) if ctx.needs_input_grad[0] else None
        return grad_bias, *gradients(ctx, grad, ctx.needs_input_grad[1:], multiply)
