"""``outblas.linear``: ``torch.nn.functional.linear`` on the library's kernels.

Without a bias, the product is decided as :func:`outblas.matmul` decides it. With an activation or a residual, one
kernel may compute everything (:mod:`outblas.dispatch.fused`). A bias that is not fused goes to torch: adding it
to a finished product would round twice. It would also cost more than the kernels gain. The products of its gradients
may still run on the library's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.dispatch import device_registry, fused, native_table
from outblas.dispatch.fused_layer import (
    ActivationName,
    apply_activation,
    check_out,
    checked_epilogue,
    epilogue_of,
    matrices,
    plus_bias,
    run_biased,
    run_fused,
)
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.matmul import matmul, run_matmul
from outblas.dispatch.product import may_have_kernel
from outblas.dispatch.product_operands import GRADIENT_WANTED, fold, import_torch, unfold, why_left_to_torch
from outblas.runtime.full_precision import full_precision_reductions

if TYPE_CHECKING:
    import torch


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accurate: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``x @ w.t() + bias``, or ``act(x @ w.t() + bias) + residual`` with an activation or a residual.

    A call with an activation or a residual may run as one fused kernel. A call with only a bias may do so during CUDA
    graph capture, or always with ``OUTBLAS_FUSED=1``. A fused kernel rounds once, at the end; torch rounds after each
    operation, so results may differ by these roundings. The kernel is compiled in the background after the first call,
    or by :func:`warm`. Until it is loaded, torch's operations run instead. They also run if a gradient is needed or if
    no kernel fits (see :mod:`outblas.dispatch.fused`).

    Args:
        x: (..., K) or (K). :func:`outblas.matmul` lists the inputs that can use a library kernel.
        w: (N, K) or (K), same dtype and device as ``x``.
        bias: (N), or any shape that torch accepts; None: no bias.
        activation: ``silu``, ``gelu`` (erf, torch's default) or ``gelu_tanh`` (``approximate="tanh"``); None: none.
        residual: same shape, dtype and device as the result; any dtype under autocast. None: no residual.
        out: (..., N), contiguous; None: a new tensor.
        accurate: as for :func:`outblas.matmul`. Gradients of a call with a bias follow only :func:`outblas.enable`.
        batch_invariant: as for :func:`outblas.matmul`. No fused kernel runs: the product is rounded, then the bias is
            added, and so on.

    Returns:
        (..., N) with the dtype of ``x``; ``out`` if given.

    Raises:
        TensorError: ``out`` shares memory with an input other than the residual. Also if the residual, or ``out`` in a
            call with an activation or a residual, has another shape, dtype or device. With ``batch_invariant``, also if
            the bias has another dtype or does not expand to the result.
        UsageError: the activation is unknown, or ``batch_invariant`` is given for operands that
            :func:`outblas.matmul` rejects.
        DeviceError: the driver refused a launch, or cuBLASLt refused a call; or as for :func:`outblas.matmul`.
        ToolchainMissing: torch is not installed.
    """
    torch = import_torch()
    if batch_invariant or (out is not None and process_guarantee() == "batch_invariant"):
        return _in_steps(x, w, bias, activation, residual, out)
    if activation is not None or residual is not None:
        return _followed(x, w, bias, activation, residual, out, accurate)
    if accurate:
        if bias is None:
            return matmul(x, w.t(), out=out, accurate=True)
        with full_precision_reductions():
            return linear(x, w, bias, out=out)
    result = None
    if isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor) and x.dim() and w.dim() == 2:
        if bias is None:
            result = _product(x, w.t(), out)
        else:
            if out is not None:
                check_out(x, w, bias, out)
            result = run_biased(x, w, bias, out)
            if result is None and out is None:
                result = _with_bias(x, w, bias)
    if result is not None:
        return result
    if out is None:
        return torch.nn.functional.linear(x, w, bias)
    return torch._C._nn.linear(x, w, bias, out=out)


def warm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> bool:
    """Compile, load and run once the fused kernel of a ``linear`` or ``gated_linear`` call; discard the result.

    Call it before CUDA graph capture, or to avoid running torch's operations in the first calls. It waits for the
    compiler.

    Args:
        x: as for :func:`linear`.
        w: as for :func:`linear`; with ``gated``, as for :func:`outblas.gated_linear`.
        bias: as for :func:`linear`.
        activation: as for :func:`linear`; None means ``silu`` with ``gated``.
        residual: as for :func:`linear`; must be None with ``gated``.
        gated: warm :func:`outblas.gated_linear` instead of :func:`linear`.

    Returns:
        True if such calls now run as one kernel. If False, :func:`why_not` gives the reason.

    Raises:
        UsageError: the activation is unknown, or a residual is given with ``gated``.
        TensorError: a shape, dtype or device does not match, as for :func:`linear`.
        DeviceError: the driver refused the launch.
        ToolchainMissing: torch is not installed.
    """
    import_torch()
    extra, epilogue = epilogue_of(x, w, bias, activation, residual, gated)
    return run_fused(x, w, extra, epilogue, None, wait=True) is not None


def why_not(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> str:
    """Return in one line why such a call cannot run as one kernel even when compiled; empty if it can.

    The arguments are those of :func:`warm`, and ``out``. For a bias alone the answer assumes that
    :func:`outblas.dispatch.fused_layer.kernel_adds_bias` is True.

    Raises:
        UsageError: as :func:`warm`.
        TensorError: as :func:`warm`.
        ToolchainMissing: torch is not installed.
    """
    import_torch()
    extra, epilogue = epilogue_of(x, w, bias, activation, residual, gated)
    found = matrices(x, w, extra, epilogue, out)
    return found if isinstance(found, str) else fused.why_not(found.a, found.b, found.extra, epilogue, found.c)


def _followed(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: ActivationName | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    accurate: bool,
) -> torch.Tensor:
    """Compute with an activation or a residual: in one kernel, or by torch's operations one after the other."""
    import torch

    extra, epilogue = checked_epilogue(x, w, bias, activation, residual, out)
    result = run_fused(x, w, extra, epilogue, out)
    if result is not None:
        return result
    y = apply_activation(linear(x, w, bias, accurate=accurate), epilogue.activation)
    if residual is not None:
        return torch.add(y, residual) if out is None else torch.add(y, residual, out=out)
    return y if out is None else torch.mul(y, 1, out=out)


def _in_steps(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: ActivationName | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a batch-invariant product, and then torch's operations, each of which treats rows alike."""
    _, epilogue = checked_epilogue(x, w, bias, activation, residual, out)
    y = matmul(x, w.t(), batch_invariant=True)
    y = apply_activation(y if bias is None else plus_bias(y, bias), epilogue.activation)
    y = y if residual is None else y + residual
    return y if out is None else out.copy_(y)


def _product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    result = native_table.table_product(x, w, out)
    return run_matmul(x, w, out) if result is None else result


def _with_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Return ``torch.addmm`` whose gradients may use the library's kernels; None if torch must do all of it.

    Batch-invariant products end in the operator that :func:`outblas.enable` has replaced.
    """
    import torch

    if process_guarantee() == "batch_invariant":
        return None
    if torch.compiler.is_compiling() or not isinstance(bias, torch.Tensor) or bias.shape != w.shape[:1]:
        return None
    if why_left_to_torch(x, w, bias) != GRADIENT_WANTED or x.device.type != device_registry.DEVICE_TYPE:
        return None
    folded = fold(x, w.t())
    if folded is None or bias.dtype != x.dtype or not may_have_kernel(x, w):
        return None
    from outblas.dispatch.autograd import BiasedProductFunction

    return unfold(BiasedProductFunction.apply(bias, folded.a, folded.b), folded.shape)
