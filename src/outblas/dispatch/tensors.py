"""Read torch tensors before a decision: their properties, and the reasons for which torch must see the call.

``csrc/read.c`` reads the same for calls that were decided before: change both together.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from outblas.core.errors import TensorError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.core.problem import ROW_ALIGN_BYTES
from outblas.dispatch.decide import Operand
from outblas.runtime.launch import may_overlap

if TYPE_CHECKING:
    import torch

#: A reason of :func:`why_left_to_torch` that is no obstacle: an operator with gradients can still run a kernel.
GRADIENT_WANTED = "a gradient is wanted"


def import_torch() -> Any:
    """Import and return torch; raise ToolchainMissing if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise ToolchainMissing("torch is not installed", "torch built for CUDA", install_hint("gpu")) from error
    return torch


def why_left_to_torch(a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor | None) -> str:
    """Return in one line why torch must see this call regardless of its shapes; empty if it need not.

    Example: ``"an operand is not a plain torch.Tensor"`` for a subclass; empty for two plain tensors under
    ``torch.no_grad()``. :data:`GRADIENT_WANTED` is returned only if no other reason holds.

    Args:
        a: first operand.
        b: second operand; None: it does not count.
        out: the output; None: a new one.
    """
    import torch

    tensors = [t for t in (a, b, out) if t is not None]
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "an operand is not a plain torch.Tensor"
    if any(t.device != a.device for t in tensors):
        return "the operands are on different devices"
    if torch._C._len_torch_function_stack() and _watched():
        return "a function mode watches"
    if torch.jit.is_tracing():
        return "the call is traced"
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False)
    if any(t.layout != torch.strided or t.is_nested or t.is_neg() or t._is_zerotensor() or wrapped(t) for t in tensors):
        return "an operand is sparse, nested, lazily negated or transformed by torch.func"
    has_storage = getattr(torch._C, "_has_storage", None)
    if has_storage is not None and not all(has_storage(t) for t in tensors):  # as has_memory
        return "an operand has no memory of its own"
    if any(getattr(t, "has_names", bool)() for t in tensors):  # up to torch 2.12
        return "an operand has named dimensions"
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return "out is an inference tensor, which torch writes in inference mode only"
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return "a forward-mode gradient is wanted"
    if a.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return "autocast chooses the dtype"
    if getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)() and not _dispatch_is_off():
        return "a dispatch mode watches"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return (
            f"{GRADIENT_WANTED} within torch.func" if torch._C._are_functorch_transforms_active() else GRADIENT_WANTED
        )
    return ""


def _dispatch_is_off() -> bool:
    """Return True where no dispatch mode sees a call, as when Inductor times a product during a compilation."""
    import torch

    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


def has_memory(t: torch.Tensor) -> bool:
    """Return False for a tensor without storage, such as one of a batch of gradients (``is_grads_batched``)."""
    import torch

    return bool(getattr(torch._C, "_has_storage", lambda t: True)(t))


def is_half(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if both tensors are fp16, or both are bf16."""
    import torch

    return a.dtype in (torch.float16, torch.bfloat16) and a.dtype == b.dtype


def check_overlap(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Raise :class:`TensorError` for an output that overlaps an input."""
    if out is None or out.device.type == "meta":
        return
    for name, tensor in (("a", a), ("b", b)):
        if may_overlap(tensor, out):
            raise TensorError(f"out shares memory with {name}", "an output of its own", "allocate out separately")


def _watched() -> bool:
    """Return True if a function mode other than that of a default device is on."""
    import torch

    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``fp16``, ``bf16``, or the name of another dtype as torch writes it, e.g. ``torch.float32``."""
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(dtype), str(dtype))


@functools.lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


def operand(t: torch.Tensor) -> Operand:
    """Return the properties of a torch tensor on which a decision depends.

    Example: for ``torch.empty(2, 3, dtype=torch.half)`` it is ``Operand((2, 3), (3, 1), "fp16", "cpu", 0)`` (the last
    is the address modulo 16).
    """
    offset = t.data_ptr() % ROW_ALIGN_BYTES
    return Operand(tuple(t.shape), tuple(t.stride()), dtype_name(t.dtype), _device_name(t.device), offset)


def aligned_operand(t: torch.Tensor) -> Operand:
    """Return :func:`operand` of a tensor that has no address yet, such as a fake one: its ``offset`` is 0."""
    return Operand(tuple(t.shape), tuple(t.stride()), dtype_name(t.dtype), _device_name(t.device))
