"""Batch-invariant forms of torch's operators of products, below autograd and autocast.

A true batch is one product after the other, each by a kernel of its weight's order. A bias is added to the finished
product: that rounds once more than torch, and its place in the batch does not matter. Torch computes products
of other dtypes and devices, without any guarantee.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.dispatch import device_registry
from outblas.dispatch.aten_products import HALF_DTYPES, our_bmm, our_mm, torch_addmm, torch_baddbmm, torch_bmm, torch_mm
from outblas.dispatch.call_option import CallOption, option_without_promise
from outblas.dispatch.product import decide_and_run


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``aten::mm`` of (M, K) and (K, N); raise torch's errors, or DeviceError if no kernel can run."""
    result = our_mm(a, b, _option())
    return torch_mm(a, b) if result is None else result


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``aten::bmm`` of (B, M, K) and (B, K, N); raise as :func:`mm`."""
    result = our_bmm(a, b, _option())
    if result is not None:
        return result
    return _one_by_one(a, b) if _is_half_batch(a, b) else torch_bmm(a, b)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """Return ``aten::addmm``: ``beta * bias + alpha * (a @ b)``; raise as :func:`mm`."""
    product = our_mm(a, b, _option()) if bias.dtype == a.dtype else None
    if product is None:
        return torch_addmm(bias, a, b, beta=beta, alpha=alpha)
    return _added(bias, product, beta, alpha)


def baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """Return ``aten::baddbmm``: ``beta * bias + alpha * bmm(a, b)``; raise as :func:`mm`."""
    if bias.dtype != a.dtype or not _is_half_batch(a, b):
        return torch_baddbmm(bias, a, b, beta=beta, alpha=alpha)
    return _added(bias, bmm(a, b), beta, alpha)


def _option() -> CallOption:
    return option_without_promise("batch_invariant")


def _is_half_batch(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for a batch of half-precision products with at least one element on a device of kernels."""
    if a.dtype not in HALF_DTYPES or b.dtype != a.dtype or not a.dim() == b.dim() == 3 or b.device != a.device:
        return False
    fits = a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    return fits and 0 not in (*a.shape, *b.shape) and a.device.type == device_registry.DEVICE_TYPE


def _one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    option = _option()
    with torch.no_grad():
        for x, y, z in zip(a, b, c, strict=True):
            decide_and_run(x, y, z, option)
    return c


def _added(bias: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """Add a bias to a finished product in place; with ``beta=0`` its values do not count, as in torch."""
    if alpha != 1:
        product.mul_(alpha)
    return product if beta == 0 else product.add_(bias, alpha=beta)
