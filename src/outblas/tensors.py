"""What is read of torch tensors before a decision: their records, and whether torch must see the call itself.

``csrc/read.c`` reads the same for calls that were decided before: a change here is a change there.
"""

from __future__ import annotations

import functools
from typing import Any

from outblas.decide import Operand
from outblas.problem import ROW_ALIGN_BYTES

#: The one reason of :func:`why_torchs` for which our own product can be had: by an operator that autograd knows.
GRADIENT = "a gradient is wanted"


def why_torchs(torch: Any, a: Any, b: Any, out: Any) -> str:
    """Why torch must see this call whatever its shapes: something would be lost if it did not; else empty.

    :data:`GRADIENT` is said last: only where there is no other reason.
    """
    tensors = [t for t in (a, b, out) if t is not None]
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "an operand is not a plain torch.Tensor"
    if torch._C._len_torch_function_stack() and _watched(torch):
        return "a function mode watches"
    if torch.jit.is_tracing():
        return "the call is traced"
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False)
    if any(t.layout != torch.strided or t.is_nested or t.is_neg() or t._is_zerotensor() or wrapped(t) for t in tensors):
        return "an operand is sparse, nested, lazily negated or transformed by torch.func"
    if not all(has_memory(torch, t) for t in tensors):
        return "an operand has no memory of its own"
    if any(getattr(t, "has_names", bool)() for t in tensors):  # up to torch 2.12
        return "an operand has named dimensions"
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return "out is an inference tensor, which torch writes in inference mode only"
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return "a forward-mode gradient is wanted"
    if a.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return "autocast chooses the dtype"
    if getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)():
        return "a dispatch mode watches"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return f"{GRADIENT} within torch.func" if torch._C._are_functorch_transforms_active() else GRADIENT
    return ""


def has_memory(torch: Any, t: Any) -> bool:
    """Whether a tensor is its numbers; that of a batch of gradients (``is_grads_batched``) only stands for others."""
    return bool(getattr(torch._C, "_has_storage", lambda t: True)(t))


def _watched(torch: Any) -> bool:
    """Whether a function mode is on that wants to see products; that of a default device does not."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: Any) -> str:
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(dtype), str(dtype))


@functools.lru_cache(maxsize=64)
def _device_name(device: Any) -> str:
    return str(device)


def operand(t: Any) -> Operand:
    """What a decision needs to know of a torch tensor."""
    return operand_like(t)._replace(offset=t.data_ptr() % ROW_ALIGN_BYTES)


def operand_like(t: Any) -> Operand:
    """As :func:`operand`, of a tensor with no address yet, which will be aligned."""
    return Operand(tuple(t.shape), tuple(t.stride()), _dtype_name(t.dtype), _device_name(t.device))
