"""The operands of ``outblas.linear`` and ``outblas.gated_linear``: what follows the product, and checks of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from outblas.core.errors import TensorError, UsageError
from outblas.dispatch.product_operands import GRADIENT_WANTED, check_overlap, why_left_to_torch
from outblas.kernels.epilogue import ACTIVATIONS, Activation, Epilogue
from outblas.runtime.fused_launch import Extra

if TYPE_CHECKING:
    import torch

ActivationName = Literal["silu", "gelu", "gelu_tanh"]


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
        w: (N, K); if ``gated``, (2H, K), rows of gate and up by turns.
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
            raise UsageError("a residual with gated=True", "none", "add it to the result")
        if isinstance(w, torch.Tensor) and (w.dim() != 2 or w.shape[0] % 2):
            do = "interleave the two by outblas.interleave_gate_up"
            raise TensorError(f"w has shape {tuple(w.shape)}", "(2H, K), rows of gate and up by turns", do)
        activation = activation or "silu"
    if activation is not None and activation not in ACTIVATIONS[1:]:
        raise UsageError(f"activation {activation!r}", " or ".join(ACTIVATIONS[1:]), "use one of them, or None")
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
        t: the tensor to check.
        x: (..., K).
        w: (N, K).
        gated: the result has N / 2 columns instead of N.
    """
    import torch

    if not all(isinstance(o, torch.Tensor) and o.dim() for o in (x, w)):
        return
    if not isinstance(t, torch.Tensor):
        raise TensorError(f"{name} is a {type(t).__name__}", "a tensor", "pass one, of the result's shape and dtype")
    shape = (*x.shape[:-1], *((w.shape[0] // 2,) if gated else w.shape[:-1]))
    same = t.dtype == x.dtype or _autocasts(x.device.type)
    if tuple(t.shape) != shape or not same or t.device != x.device:
        raise TensorError(
            f"{name} is {tuple(t.shape)} of {t.dtype} on {t.device}",
            f"{tuple(shape)} of {x.dtype} on {x.device}",
            "expand or convert it before",
        )


def _autocasts(device_type: str) -> bool:
    import torch

    return bool(torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type))


def apply_activation(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return torch's own activation of ``y`` as a new tensor; ``y`` itself for ``"none"``.

    Args:
        y: the tensor.
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
        wrong = f"bias is {tuple(bias.shape)} of {bias.dtype}"
        raise TensorError(wrong, f"what expands to {tuple(y.shape)} of {y.dtype}", "expand or convert it before")
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
