"""The layers of ``outblas.linear`` and ``outblas.gated_linear``: their operands, and their run as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from outblas.core.errors import TensorError, UsageError
from outblas.core.switches import is_off, is_on
from outblas.dispatch import device_registry, fused
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product_operands import (
    GRADIENT_WANTED,
    check_overlap,
    fold,
    leading_dims_collapse,
    unfold,
    why_left_to_torch,
)
from outblas.kernels.epilogue import ACTIVATIONS, Activation, Epilogue
from outblas.runtime.fused_launch import Extra

if TYPE_CHECKING:
    import torch

ActivationName = Literal["silu", "gelu", "gelu_tanh"]
#: Switches the fused bias on or off where no activation or residual asks for it.
FUSED_VARIABLE = "OUTBLAS_FUSED"


def epilogue_of(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: ActivationName | None,
    residual: torch.Tensor | None,
    gated: bool = False,
) -> tuple[Extra, Epilogue]:
    """Return the tensors and the description of the operations that follow the product ``x @ w.t()``.

    Example: with a bias and ``"silu"`` the result is ``(Extra(bias, None), Epilogue(bias=True, activation="silu",
    residual=False, gated=False))``. Without an activation the description has ``"none"``, and ``"silu"`` if ``gated``.

    Args:
        x: (..., K).
        w: (N, K); if ``gated``, (2H, K), with interleaved gate and up rows.
        bias: (N), or None.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``; None: none.
        residual: shape, dtype and device of the result, or None.
        gated: the result is the activated gate times up.

    Raises:
        UsageError: the activation is unknown, or a residual comes with ``gated``.
        TensorError: ``w`` of a gated product has an odd number of rows, or the residual has another shape, dtype or
            device.
    """
    import torch

    if gated:
        if residual is not None:
            raise UsageError("a residual was passed with gated=True", "no residual", "add the residual to the result")
        if isinstance(w, torch.Tensor) and (w.dim() != 2 or w.shape[0] % 2):
            do = "interleave them with outblas.interleave_gate_up"
            raise TensorError(f"w has shape {tuple(w.shape)}", "shape (2H, K) with interleaved gate and up rows", do)
        activation = activation or "silu"
    if activation is not None and activation not in ACTIVATIONS[1:]:
        raise UsageError(f"unknown activation {activation!r}", " or ".join(ACTIVATIONS[1:]), "pass one of them or None")
    if residual is not None:
        check_like_result("residual", residual, x, w)
    return Extra(bias, residual), Epilogue(bias is not None, activation or "none", residual is not None, bool(gated))


def checked_epilogue(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: ActivationName | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    gated: bool = False,
) -> tuple[Extra, Epilogue]:
    """Return as :func:`epilogue_of`, and check ``out``, which is the result's tensor or None.

    Raises:
        UsageError: as :func:`epilogue_of`.
        TensorError: as :func:`epilogue_of`, or ``out`` does not fit or overlaps an input.
    """
    found = epilogue_of(x, w, bias, activation, residual, gated)
    if out is not None:
        check_like_result("out", out, x, w, gated)
        check_out(x, w, bias, out)
    return found


def check_like_result(name: str, t: torch.Tensor, x: torch.Tensor, w: torch.Tensor, gated: bool = False) -> None:
    """Raise TensorError unless ``t`` has the result's shape, dtype and device.

    Return silently if ``x`` or ``w`` is itself invalid: torch then raises its own error. Under autocast the dtype is
    not compared, because the result's dtype differs from that of ``x``.

    Args:
        name: name of ``t`` in the error.
        x: (..., K).
        w: (N, K).
        gated: the result has N / 2 columns instead of N.
    """
    import torch

    if not all(isinstance(o, torch.Tensor) and o.dim() for o in (x, w)):
        return
    if not isinstance(t, torch.Tensor):
        wrong = f"{name} is a {type(t).__name__}"
        raise TensorError(wrong, "a tensor", "pass a tensor with the result's shape and dtype")
    shape = (*x.shape[:-1], *((w.shape[0] // 2,) if gated else w.shape[:-1]))
    same = t.dtype == x.dtype or _autocasts(x.device.type)
    if tuple(t.shape) != shape or not same or t.device != x.device:
        wrong = f"{name} has shape {tuple(t.shape)} and dtype {t.dtype} on {t.device}"
        expected = f"shape {tuple(shape)} and dtype {x.dtype} on {x.device}"
        raise TensorError(wrong, expected, f"expand or convert {name} first")


def _autocasts(device_type: str) -> bool:
    import torch

    return bool(torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type))


def apply_activation(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return torch's own activation of ``y`` as a new tensor; ``y`` itself for ``"none"``.

    Args:
        activation: ``"silu"``, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"none"``; not checked.
    """
    import torch

    if activation == "silu":
        return torch.nn.functional.silu(y)
    if activation == "none":
        return y
    return torch.nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def plus_bias(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``y + bias`` in the shape and dtype of ``y``, for every bias that torch's ``linear`` accepts.

    Args:
        y: (..., N), a finished product.
        bias: (N), or what expands to ``y``. To a vector one row may be added, as torch does.

    Raises:
        TensorError: the bias has another dtype, or would widen the result.
    """
    rows = y.unsqueeze(0) if y.dim() == 1 else y
    widened = bias.dim() > rows.dim() or any(
        size not in (1, wanted) for size, wanted in zip(reversed(bias.shape), reversed(rows.shape), strict=False)
    )
    if bias.dtype != y.dtype or widened:
        wrong = f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}"
        expected = f"a tensor of dtype {y.dtype} that expands to {tuple(y.shape)}"
        raise TensorError(wrong, expected, "expand or convert bias first")
    return (rows + bias).view(y.shape)


def check_out(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Raise TensorError if ``out`` overlaps an input; do nothing if torch must see the call."""
    import torch

    if torch.compiler.is_compiling():
        return
    others = [t for t in (w, bias) if t is not None]
    if all(why_left_to_torch(x, other, out) in ("", GRADIENT_WANTED) for other in others):
        for other in others:
            check_overlap(x, other, out)


def kernel_adds_bias(x: torch.Tensor) -> bool:
    """Return True if a kernel may add a bias that nothing follows: while a CUDA graph is captured, unless
    ``OUTBLAS_FUSED=0``, or always with ``OUTBLAS_FUSED=1``.

    In an eager step the decision would cost the host more than the kernel gains. A graph is captured once.
    """
    return not is_off(FUSED_VARIABLE) if is_captured(x) else is_on(FUSED_VARIABLE)


def is_captured(x: torch.Tensor) -> bool:
    """Return True for a tensor of a GPU while a CUDA graph of the current stream is captured."""
    import torch

    return x.device.type == device_registry.DEVICE_TYPE and bool(torch.cuda.is_current_stream_capturing())


def run_biased(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    """Compute a layer whose bias nothing follows by :func:`run_fused`; return None if torch must compute it."""
    return run_fused(x, w, Extra(bias), fused.BIAS, out) if kernel_adds_bias(x) else None


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    extra: Extra,
    epilogue: Epilogue,
    out: torch.Tensor | None,
    wait: bool = False,
) -> torch.Tensor | None:
    """Compute everything in one kernel. Return None if torch must compute it, or all products are batch-invariant.

    Args:
        x: (..., K) or (K).
        w: (N, K).
        extra: bias and residual, as ``epilogue`` names them.
        out: the result is written here; None: a new tensor.
    """
    found = matrices(x, w, extra, epilogue, out)
    if isinstance(found, str) or process_guarantee() == "batch_invariant":
        return None
    result = fused.fused_product(found.a, found.b, found.extra, epilogue, found.c, wait=wait)
    return None if result is None else unfold(result, found.shape) if out is None else out


class LayerMatrices(NamedTuple):
    """Operands of a fused kernel, made by views alone.

    Attributes:
        a: (M, K).
        b: (K, N).
        extra: bias (N) and residual (M, N).
        c: (M, N), the output buffer; None: a new tensor.
        shape: shape of the result before it is flattened to a matrix.
    """

    a: torch.Tensor
    b: torch.Tensor
    extra: Extra
    c: torch.Tensor | None
    shape: tuple[int, ...]


def matrices(
    x: torch.Tensor, w: torch.Tensor, extra: Extra, epilogue: Epilogue, out: torch.Tensor | None
) -> LayerMatrices | str:
    """Return the operands as matrices, or one line that says why torch must see the call."""
    import torch

    given = [x, w, *(t for t in extra if t is not None)]
    if torch.compiler.is_compiling():
        return "the call is traced"
    if not all(isinstance(t, torch.Tensor) for t in given) or not x.dim() or w.dim() != 2:
        return "operands that are not a batch of rows and a matrix"
    if extra.bias is not None and extra.bias.shape != w.shape[:1]:
        return f"the bias has shape {tuple(extra.bias.shape)}"
    for others in ((w, out), extra):
        reason = why_left_to_torch(x, *others)
        if reason:
            return reason
    folded = fold(x, w.t(), None if epilogue.gated else out)
    residual = None if extra.residual is None else _rows(extra.residual)
    if folded is None or (extra.residual is not None and residual is None):
        return "rows that do not form one strided matrix"
    if not epilogue.gated:
        return LayerMatrices(folded.a, folded.b, Extra(extra.bias, residual), folded.out, folded.shape)
    if out is not None and not out.is_contiguous():
        return f"out has strides {tuple(out.stride())}"
    if 0 in w.shape:
        return "an extent is zero"
    columns = epilogue.columns(w.shape[0])
    c = None if out is None else out.view(-1, columns)
    return LayerMatrices(folded.a, folded.b, extra, c, (*folded.shape[:-1], columns))


def _rows(residual: torch.Tensor) -> torch.Tensor | None:
    """Return a view of (..., N) as a matrix, or None if that would need a copy."""
    if residual.dim() == 2:
        return residual
    if 0 in residual.shape or not leading_dims_collapse(residual.shape, residual.stride()):
        return None
    return residual.unsqueeze(0) if residual.dim() == 1 else residual.view(-1, residual.shape[-1])
