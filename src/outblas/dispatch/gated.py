"""``outblas.gated_linear``: act(gate) * up of one product, whose weights hold the rows of gate and up by turns.

A kernel's thread has neighbouring columns of the product in its registers, so what both become is known where the sums
are: half as many outputs are written, and nothing is read again. Of weights that lie one behind the other a tile has
gates or ups, and never both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas.core.errors import TensorError
from outblas.dispatch.fused_layer import ActivationName, apply_activation, checked_epilogue, run_fused
from outblas.dispatch.linear import linear
from outblas.dispatch.product_operands import import_torch

if TYPE_CHECKING:
    import torch


def gated_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName = "silu",
    out: torch.Tensor | None = None,
    accurate: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``act(x @ gate.t()) * (x @ up.t())`` for interleaved gate and up weights.

    With SiLU, this is the first half of a SwiGLU block (Shazeer, GLU Variants Improve Transformer, 2020).
    :func:`interleave_gate_up` interleaves the weights.

    The call may run as one fused kernel, compiled in the background after the first call, or by :func:`outblas.warm`
    (``gated=True``). The kernel rounds once; torch rounds three times. Torch's operations run until it is loaded. They
    also run if a gradient is needed, under torch.compile, or if no kernel fits. They read the product with a
    stride, so keep gate and up separate in a program that always falls back to torch. If the activation underflows in
    fp32 (SiLU below -88), its product with an infinity is NaN, as in torch.

    Args:
        x: (..., K) or (K). :func:`outblas.matmul` lists the inputs that can use a library kernel.
        w: (2H, K): row 2j is row j of gate, row 2j + 1 is row j of up.
        bias: (2H), interleaved like ``w``; None: no bias.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``, as for :func:`outblas.linear`.
        out: (..., H), contiguous; None: a new tensor.
        accurate: as for :func:`outblas.linear`.
        batch_invariant: as for :func:`outblas.linear`.

    Returns:
        (..., H): ``act(y[..., 0::2]) * y[..., 1::2]`` with ``y = x @ w.t() + bias``.

    Raises:
        TensorError: ``w`` is not a matrix with an even number of rows; or ``out`` has another shape, dtype or device,
            or shares memory with an input.
        UsageError: the activation is unknown, or as for :func:`outblas.linear`.
        DeviceError: the driver refused a launch, or cuBLASLt refused a call; or as for :func:`outblas.matmul`.
        ToolchainMissing: torch is not installed.
    """
    torch = import_torch()
    extra, epilogue = checked_epilogue(x, w, bias, activation, None, out, gated=True)
    result = None if batch_invariant else run_fused(x, w, extra, epilogue, out)
    if result is not None:
        return result
    y: Any = linear(x, w, bias, accurate=accurate, batch_invariant=batch_invariant)
    gate = apply_activation(y[..., 0::2], epilogue.activation)
    return gate * y[..., 1::2] if out is None else torch.mul(gate, y[..., 1::2], out=out)


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of gate and up into a contiguous copy.

    Example: gates ``[g0, g1]`` and ups ``[u0, u1]`` give ``[g0, u0, g1, u1]``.

    Args:
        gate: (H, K) weights or (H) biases.
        up: same shape, dtype and device as ``gate``.

    Returns:
        (2H, K) or (2H): row 2j is row j of gate, row 2j + 1 is row j of up.

    Raises:
        TensorError: an argument is not a tensor, or the two differ in shape, dtype or device.
    """
    torch = import_torch()
    for name, given in (("gate", gate), ("up", up)):
        if not isinstance(given, torch.Tensor):
            raise TensorError(f"{name} is a {type(given).__name__}", "a tensor", "pass both weights, or both biases")
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    if not alike or not gate.dim():
        words = [f"{name} is {tuple(t.shape)} of {t.dtype} on {t.device}" for name, t in (("gate", gate), ("up", up))]
        raise TensorError(", ".join(words), "the same shape, dtype and device", "pass both weights, or both biases")
    interleaved: Any = torch.stack((gate, up), dim=1).flatten(0, 1)
    return interleaved
