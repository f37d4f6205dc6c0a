"""``outblas.gated_linear``: act(gate) * up of one product, whose weights hold the rows of gate and up by turns.

A kernel's thread has neighbouring columns of the product in its registers, so what both become is known where the sums
are: half as many outputs are written, and nothing is read again. Of weights that lie one behind the other a tile has
gates or ups, and never both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas.core.errors import TensorError
from outblas.dispatch.linear import (
    ActivationName,
    apply_activation,
    check_like_result,
    check_out,
    epilogue_of,
    linear,
    run_fused,
)
from outblas.dispatch.tensors import import_torch

if TYPE_CHECKING:
    import torch


def gated_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(x @ gate.t()) * (x @ up.t())``, with SiLU the first half of a SwiGLU block (Shazeer, GLU Variants Improve
    Transformer, 2020), of weights that :func:`interleave_gate_up` has made of gate and up.

    Args:
        x: (..., K) or (K). w: (2H, K): row 2j is row j of gate, row 2j + 1 that of up. Which products may be ours: see
            :func:`outblas.matmul`. bias: (2H), interleaved as w; None: none is added.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``, as of :func:`outblas.linear`.
        out: (..., H), contiguous; None: allocated.

    Returns:
        (..., H): ``y = x @ w.t() + bias``, and of it ``act(y[..., 0::2]) * y[..., 1::2]``.

    It may be one kernel, as :func:`outblas.linear` with an activation: compiled behind the first call or by
    :func:`outblas.warm` (``gated=True``), and rounded once, where torch rounds three times. Until then, where a
    gradient is wanted, in what torch.compile traces and where no kernel serves, it is these operations of torch's,
    which read the product with a stride: a program that has the choice keeps gate and up apart for them.
    Where the activation underflows in fp32 (SiLU below -88) its product with an infinity is NaN, as torch's is.

    Raises:
        TensorError: ``w`` is no matrix of an even number of rows, tensors are on different devices, or ``out`` is of
            another shape, dtype or device or shares memory with an input.
        UsageError: no such activation.
        DeviceError, ToolchainMissing: as :func:`outblas.matmul`.
    """
    torch = import_torch()
    extra, epilogue = epilogue_of(x, w, bias, activation, None, gated=True)
    if out is not None:
        check_like_result("out", out, x, w, gated=True)
        check_out(x, w, bias, out)
    result = run_fused(x, w, extra, epilogue, out)
    if result is not None:
        return result
    y: Any = linear(x, w, bias)
    gate = apply_activation(y[..., 0::2], epilogue.activation)
    return gate * y[..., 1::2] if out is None else torch.mul(gate, y[..., 1::2], out=out)


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Weights or biases of gate and up, (H, K) or (H) each, by turns: (2H, K) or (2H), contiguous, row 2j row j of
    gate and row 2j + 1 that of up. A copy.

    Raises:
        TensorError: two of different shapes, dtypes or devices, or no tensors.
    """
    torch = import_torch()
    for name, given in (("gate", gate), ("up", up)):
        if not isinstance(given, torch.Tensor):
            raise TensorError(
                f"{name} is a {type(given).__name__}", "a tensor", "pass the weights, or the biases, of both"
            )
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    if not alike or not gate.dim():
        words = [f"{name} is {tuple(t.shape)} of {t.dtype} on {t.device}" for name, t in (("gate", gate), ("up", up))]
        raise TensorError(
            ", ".join(words),
            "two of one shape, dtype and device",
            "pass the weights, or the biases, of both",
        )
    interleaved: Any = torch.stack((gate, up), dim=1).flatten(0, 1)
    return interleaved
