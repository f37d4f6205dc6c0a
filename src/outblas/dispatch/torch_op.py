"""``outblas::mm``: the product as a torch operator, registered when this module is imported.

torch.compile keeps the operator in its graphs, and autograd knows its gradients. Each call decides anew which kernel
runs. ``outblas::mm_accurate`` and ``outblas::mm_batch_invariant`` keep their guarantee when the process has none.

The operator costs the host more than the native table and :mod:`outblas.dispatch.autograd`, so eager calls never use
it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from outblas.dispatch import invariant_operators
from outblas.dispatch.autograd import compute_mm, gradients, save_operands
from outblas.dispatch.call_option import option_without_promise
from outblas.dispatch.guarantees.guarantee import GUARANTEES, Guarantee

# Inductor must not hand over other strides than were traced: our kernels are chosen by them.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)
_LIBRARY = torch.library.Library("outblas", "FRAGMENT")


def _setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    save_operands(ctx, inputs[0], inputs[1], ctx.needs_input_grad)


def _compute(guarantee: Guarantee, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return compute_mm(a, b, option_without_promise(guarantee))


def _backward(guarantee: Guarantee, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return gradients(ctx, grad, ctx.needs_input_grad, MM[guarantee])


def _batched(
    guarantee: Guarantee, info: Any, in_dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Leave a batch of products (vmap) to ``torch.matmul``; the batch is dimension 0 of the result.

    With a guarantee they are computed one by one, by the operator that keeps it.
    """
    batches = [t if d is None else t.movedim(d, 0) for t, d in zip((a, b), in_dims, strict=True)]
    if guarantee == "none" or info.batch_size == 0:
        return torch.matmul(*batches), 0
    each = (t.expand(info.batch_size, *t.shape) if d is None else t for t, d in zip(batches, in_dims, strict=True))
    return torch.stack([MM[guarantee](*pair) for pair in zip(*each, strict=True)]), 0


def register_behind_autograd(schema: str, product: Any, fake: Any) -> Any:
    """Register an operator of ``outblas::`` for graphs behind autograd; return it.

    Args:
        schema: its name and its arguments, e.g. ``double(Tensor a) -> Tensor``.
        product: function that computes it on real tensors, below autograd.
        fake: function of fake tensors that returns a fake result.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, product, key)
    torch.library.register_fake(f"outblas::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.outblas, name).default


def _registered(name: str, guarantee: Guarantee) -> Any:
    """Register the product with a guarantee, its gradients and its batches under a name; return the operator."""
    product = functools.partial(_compute, guarantee)
    operator = register_behind_autograd(f"{name}(Tensor a, Tensor b) -> Tensor", product, torch.mm)
    full, backward = f"outblas::{name}", functools.partial(_backward, guarantee)
    torch.library.register_autograd(full, backward, setup_context=_setup, lib=_LIBRARY)
    torch.library.register_vmap(full, functools.partial(_batched, guarantee), lib=_LIBRARY)
    return operator


#: Guarantee -> operator: (M, K) and (K, N) -> (M, N) of the same dtype; raises torch.mm's errors.
MM: dict[Guarantee, Any] = {
    guarantee: _registered("mm" if guarantee == "none" else f"mm_{guarantee}", guarantee) for guarantee in GUARANTEES
}
#: The operator without a guarantee of its own: that of the process holds.
mm = MM["none"]
#: torch's operator -> the batch-invariant one with the same arguments.
INVARIANT = {
    torch.ops.aten.mm.default: MM["batch_invariant"],
    torch.ops.aten.bmm.default: register_behind_autograd(
        "bmm_batch_invariant(Tensor a, Tensor b) -> Tensor", invariant_operators.bmm, torch.bmm
    ),
    torch.ops.aten.addmm.default: register_behind_autograd(
        "addmm_batch_invariant(Tensor bias, Tensor a, Tensor b, *, Scalar beta=1, Scalar alpha=1) -> Tensor",
        invariant_operators.addmm,
        torch.addmm,
    ),
    torch.ops.aten.baddbmm.default: register_behind_autograd(
        "baddbmm_batch_invariant(Tensor bias, Tensor a, Tensor b, *, Scalar beta=1, Scalar alpha=1) -> Tensor",
        invariant_operators.baddbmm,
        torch.baddbmm,
    ),
}
