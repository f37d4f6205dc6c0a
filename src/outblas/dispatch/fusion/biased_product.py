"""``aten::addmm`` by one kernel that adds the bias before it rounds, below autograd and autocast."""

from __future__ import annotations

from typing import Any

import torch

from outblas.dispatch import device_registry
from outblas.dispatch.aten_products import HALF_DTYPES
from outblas.dispatch.fusion.fused import BIAS, fused_product
from outblas.dispatch.tensors import why_left_to_torch
from outblas.runtime.fused_launch import Extra


def biased_product(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor | None:
    """Return ``a @ b + bias`` by one kernel; None if torch must compute it.

    The kernel is compiled in the background after the first call, or by :func:`outblas.warm`. Until then torch
    computes.

    Args:
        bias: (N); another shape is left to torch.
        a: (M, K), fp16 or bf16.
        b: (K, N).
        beta: torch's factor of the bias; all but 1 is left to torch.
        alpha: torch's factor of the product; all but 1 is left to torch.

    Raises:
        DeviceError: the driver refused the launch.
    """
    if beta != 1 or alpha != 1 or a.dtype not in HALF_DTYPES or not a.dim() == b.dim() == 2:
        return None
    alike = all(t.dtype == a.dtype and t.device == a.device for t in (bias, b))
    if not alike or bias.shape != b.shape[1:] or a.device.type != device_registry.DEVICE_TYPE:
        return None
    with torch.no_grad():  # autograd runs above
        return None if why_left_to_torch(a, b, bias) else fused_product(a, b, Extra(bias), BIAS)
