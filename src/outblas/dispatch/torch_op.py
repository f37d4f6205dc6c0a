"""``outblas::mm``: the product as a torch operator, registered when this module is imported.

torch.compile keeps the operator in its graphs, and autograd knows its gradients. Each call decides anew which kernel
runs. The operator costs the host more than the native table and :mod:`outblas.dispatch.autograd`, so eager calls
never use it.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.dispatch.autograd import compute_mm, gradients, save_operands

# Inductor must not hand over other strides than were traced: our kernels are chosen by them.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)
_NAME = "outblas::mm"
_LIBRARY = torch.library.Library("outblas", "FRAGMENT")


def _fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def _setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    save_operands(ctx, inputs[0], inputs[1], ctx.needs_input_grad)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return gradients(ctx, grad, ctx.needs_input_grad, mm)


def _batched(info: Any, in_dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Leave a batch of products (vmap) to ``torch.matmul``; the batch is dimension 0 of the result."""
    batches = [t if d is None else t.movedim(d, 0) for t, d in zip((a, b), in_dims, strict=True)]
    return torch.matmul(*batches), 0


_LIBRARY.define("mm(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("mm", compute_mm, _key)
torch.library.register_fake(_NAME, _fake, lib=_LIBRARY)
torch.library.register_autograd(_NAME, _backward, setup_context=_setup, lib=_LIBRARY)
torch.library.register_vmap(_NAME, _batched, lib=_LIBRARY)

#: (M, K) and (K, N) -> (M, N) of the same dtype; raises torch.mm's errors.
mm = torch.ops.outblas.mm.default
