"""Read the operands of a call before a decision: the reasons for which torch must see it, and their properties.

A call may be one product of two matrices by views, without a copy (:func:`fold`).

``csrc/read.c`` reads the same for calls that were decided before: change both together.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.errors import TensorError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.core.problem import ROW_ALIGN_BYTES
from outblas.dispatch import device_registry
from outblas.dispatch.decide import Operand
from outblas.runtime.launch import may_overlap

if TYPE_CHECKING:
    import torch

#: A reason of :func:`why_left_to_torch` that is no obstacle: an operator with gradients can still run a kernel.
GRADIENT_WANTED = "a gradient is wanted"


def import_torch() -> Any:
    """Import and return torch; raise ToolchainMissing if it is not installed."""
    try:
        import torch  # a statement, since dynamo traces no importlib.import_module
    except ImportError as error:
        raise ToolchainMissing("torch is not installed", "a torch build for CUDA", install_hint("gpu")) from error
    return torch


def why_left_to_torch(a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor | None) -> str:
    """Return in one line why torch must see this call regardless of its shapes; empty if it need not.

    Example: ``"an operand is not a plain torch.Tensor"`` for a subclass; empty for two plain tensors under
    ``torch.no_grad()``. :data:`GRADIENT_WANTED` is returned only if no other reason holds.

    Args:
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


def as_plain(t: torch.Tensor) -> torch.Tensor:
    """Return an operator's operand as a ``torch.Tensor`` of the same memory, if a subclass changes no computation.

    vLLM's weights are of subclasses of Parameter, whose ``__torch_function__`` the call has passed already. A subclass
    with a ``__torch_dispatch__`` of its own stays as it is.
    """
    import torch

    own = type(t)
    if own in (torch.Tensor, torch.nn.Parameter):
        return t
    if own.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach()


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


def why_not_one_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> str:
    """Return why a call is not one product of half-precision matrices on a GPU; empty if it is, or has no element.

    A wanted gradient is no reason. A batched ``a`` may be copied, as :func:`fold` does with ``may_copy``.
    """
    if not all(isinstance(t, import_torch().Tensor) and t.numel() for t in (a, b)):
        return ""
    if a.device.type != device_registry.DEVICE_TYPE or not is_half(a, b):
        return f"{a.dtype} and {b.dtype} on {a.device}"
    reason = why_left_to_torch(a, b, out)
    if reason and reason != GRADIENT_WANTED:
        return reason
    operands = fold(a, b, out, True)
    if operands is None:
        return f"{tuple(a.shape)} by {tuple(b.shape)}, which is not one product of matrices without a copy"
    if out is None or (tuple(out.shape) == operands.shape and out.dtype == a.dtype):
        return ""
    return f"an output of shape {tuple(out.shape)} and {out.dtype}"


def check_overlap(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Raise :class:`TensorError` for an output that overlaps an input."""
    if out is None or out.device.type == "meta":
        return
    for name, tensor in (("a", a), ("b", b)):
        if may_overlap(tensor, out):
            raise TensorError(f"out shares memory with {name}", "separate memory", "allocate a separate tensor for out")


def _watched() -> bool:
    """Return True if a function mode other than that of a default device is on."""
    import torch

    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)


class ProductOperands(NamedTuple):
    """The operands of one product of two matrices, as :func:`fold` makes them.

    Attributes:
        a: (M, K), a view.
        b: (K, N), a view.
        out: (M, N), a view of the given output; None: to be allocated.
        shape: shape that torch.matmul gives the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    shape: tuple[int, ...]


def fold(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, may_copy: bool = False
) -> ProductOperands | None:
    """Rewrite ``torch.matmul(a, b)`` as one product of matrices on views. Return None if that would need a copy.

    A vector ``a`` becomes a matrix of one row, a vector ``b`` one of one column. The rows of a batched ``a`` are
    stacked; ``b`` may then have a batch of at most 1. Return None for a matrix times a batch, too: torch computes it
    transposed, and results must have torch's strides. Return None if an operand of another rank than 2 has no element.

    Example: shapes (2, 3, 8) and (8, 5) give views (6, 8) and (8, 5), ``out`` None and ``shape`` (2, 3, 5).

    Args:
        out: contiguous output of the product's shape; None: none.
        may_copy: copy a batched ``a`` whose rows do not lie below each other, for one ``b``; torch would copy it, too.
    """
    if a.dim() == 2 == b.dim():
        return ProductOperands(a, b, out, (a.shape[0], b.shape[1]))
    if may_copy and a.dim() > 2 >= b.dim():
        a = a.contiguous()
    found = _batch(a, b)
    if found is None or 0 in (*a.shape, *b.shape):
        return None
    batch, columns = found
    inner, vector = a.shape[-1], b.dim()
    if b.dim() == 1:
        b = b.unsqueeze(1)
    elif b.dim() > 2:
        b = b[(0,) * (b.dim() - 2)]
    if b.shape[0] != inner or (a.dim() > 2 and not leading_dims_collapse(a.shape, a.stride())):
        return None
    shape = (*batch, *columns)
    if out is not None:
        # torch resizes the output of a product with a vector, to what depends on its version.
        if 1 in (a.dim(), vector) or tuple(out.shape) != shape or not out.is_contiguous():
            return None
        out = out.view(-1, b.shape[1])
    return ProductOperands(a.unsqueeze(0) if a.dim() == 1 else a.view(-1, inner) if a.dim() > 2 else a, b, out, shape)


def unfold(c: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the product of two matrices in the shape of a folded product.

    The result is no view in autograd's sense, because torch's is none. Example: ``unfold(c, (2, 3, 5))`` of a (6, 5)
    tensor has shape (2, 3, 5). A ``c`` of that shape is returned itself.
    """
    import torch

    return c if tuple(c.shape) == tuple(shape) else torch.ops.aten._unsafe_view.default(c, shape)


def leading_dims_collapse(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if all dimensions but the last can be viewed as one; strides of extents of 1 do not count.

    Example: ``leading_dims_collapse((2, 3, 8), (24, 8, 1))`` is True, with strides ``(48, 8, 1)`` it is False.
    """
    rows = [(extent, stride) for extent, stride in zip(shape[:-1], strides[:-1], strict=True) if extent != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in zip(rows[:-1], rows[1:], strict=True))


def _batch(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (result dimensions before the columns, column dimensions).

    None if it is not a single product of matrices.
    """
    rows = tuple(a.shape[:-1])
    if a.dim() == 0 or b.dim() == 0 or a.dim() == 1 == b.dim():
        return None
    if b.dim() <= 2:
        return rows, tuple(b.shape[1:])
    if a.dim() <= 2 or any(extent != 1 for extent in b.shape[:-2]):
        return None
    return (1,) * (b.dim() - a.dim()) + rows, (b.shape[-1],)


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


def read_operands(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> tuple[Operand, Operand, Operand | None]:
    """Return :func:`operand` of each tensor of a product; None for no output."""
    return operand(a), operand(b), None if out is None else operand(out)


def aligned_operand(t: torch.Tensor) -> Operand:
    """Return :func:`operand` of a tensor that has no address yet, such as a fake one: its ``offset`` is 0."""
    return Operand(tuple(t.shape), tuple(t.stride()), dtype_name(t.dtype), _device_name(t.device))
