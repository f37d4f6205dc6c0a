"""``aten::addmm`` by one kernel that adds the bias before it rounds, below autograd and autocast.

``outblas::addmm`` stands for it in compiled graphs, where M may be symbolic. Engines run each M that they capture once
before. That call waits for the compiler, so that the captured one finds the kernel loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.core.switches import is_off
from outblas.dispatch import device_registry, invariant_operators
from outblas.dispatch.aten_products import HALF_DTYPES, torch_addmm
from outblas.dispatch.fused import BIAS, fused_product
from outblas.dispatch.fused_layer import FUSED_VARIABLE, is_captured
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product import has_kernel
from outblas.dispatch.product_operands import as_plain, why_left_to_torch
from outblas.dispatch.torch_op import register_behind_autograd
from outblas.dispatch.unlisted_shapes import WAITED_M, class_width
from outblas.runtime.fused_launch import Extra


def biased_product(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, wait: bool = False
) -> torch.Tensor | None:
    """Return ``a @ b + bias`` by one kernel; None if torch must compute it.

    The kernel is compiled in the background after the first call, or by :func:`outblas.warm`. Until then torch
    computes, unless ``wait`` is given.

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
        return None if why_left_to_torch(a, b, bias) else fused_product(a, b, Extra(bias), BIAS, wait=wait)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``bias + a @ b``; by one kernel for M that engines capture, where the library has one for the product.

    Such M are few, so that no call of another M waits for a decision or for the compiler. The process's guarantee holds
    in graphs that were compiled before it, too.
    """
    if process_guarantee() == "batch_invariant":
        return invariant_operators.addmm(bias, a, b)
    if _is_captured_m(a.shape[0]) and not is_off(FUSED_VARIABLE) and _serves(a, b):
        result = biased_product(as_plain(bias), as_plain(a), as_plain(b), wait=not is_captured(a))
        if result is not None:
            return result
    return torch_addmm(bias, a, b)


def _is_captured_m(m: int) -> bool:
    """Return whether engines capture graphs of this number of rows."""
    return m <= WAITED_M and m % class_width(m) == 0


def _serves(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type != device_registry.DEVICE_TYPE or a.device != b.device:
        return False
    return has_kernel(device_registry.device_state(a.device.index), a, b)


def is_biased_layer(bias: Any, a: Any, b: Any) -> bool:
    """Return True if the values of three graph nodes are a bias (N), (M, K), and (K, N) of numbers, with an M served.

    A fixed M is served if engines capture it. A symbolic one is, and no symbolic extent is compared with a number, so
    the graph gets no guard.
    """
    if not all(isinstance(each, torch.Tensor) for each in (bias, a, b)):
        return False
    if isinstance(a.shape[0], int) and not _is_captured_m(a.shape[0]):
        return False
    if bias.dim() != 1 or not all(isinstance(extent, int) for extent in (*bias.shape, *b.shape)):
        return False
    return bias.shape == b.shape[1:] and bias.dtype == b.dtype and bias.device == b.device


#: Bias (N), (M, K) and (K, N) -> (M, N).
addmm = register_behind_autograd("addmm(Tensor bias, Tensor a, Tensor b) -> Tensor", _addmm, torch.addmm)
