"""``outblas.grouped_mm`` and ``outblas.moe_mlp``: the products of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas.core.errors import TensorError
from outblas.dispatch.product_operands import import_torch

if TYPE_CHECKING:
    import torch


def grouped_mm(
    a: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Multiply each group of rows by its own weight: ``c[begin:end] = a[begin:end] @ w[g] + bias[g]``.

    A group begins where the one before ends. The host never reads ``ends``, so a CUDA graph may hold the call. Sums are
    fp32. The kernels are for Hopper; torch computes elsewhere, where a gradient is needed, under torch.compile, and
    where no kernel is faster. The first call of a kernel that is not shipped compiles it in the background, unless
    ``gated`` is given.

    Args:
        a: (rows, K), fp16 or bf16; the groups' rows one after the other.
        w: (groups, K, N). Weights that are stored as (groups, N, K) are passed as ``w.transpose(-2, -1)``.
        ends: int32 (groups), the end of each group. Ends that run backwards or past the last row are clamped by the
            kernel; torch's product does not check them.
        bias: (groups, N); None: no bias.
        gated: return ``silu(y[:, : N // 2]) * y[:, N // 2 :]`` of the product y.
        out: (rows, N), or (rows, N // 2) with ``gated``; contiguous. None: a new tensor.
        check: read ``ends`` first, which waits for the GPU, and raise an error if they do not ascend within ``a``.

    Returns:
        (rows, N) or (rows, N // 2). Rows behind the last end are not computed, and may hold anything.

    Raises:
        TensorError: the bias or ``out`` has another shape or dtype. Also if ``out`` is on another device, is not
            contiguous or overlaps an input, or if ``check`` found wrong ends.
        RuntimeError: torch's own error for operands that do not fit.
        DeviceError: the driver refused a launch.
        ToolchainMissing: torch is not installed.
    """
    torch = import_torch()
    from outblas.dispatch.grouped.grouped_product import by_torch, is_recorded, our_grouped_mm

    if bias is not None and (bias.dtype != a.dtype or tuple(bias.shape) != (w.shape[0], w.shape[-1])):
        wrong, wanted = f"bias is {tuple(bias.shape)} of {bias.dtype}", f"{(w.shape[0], w.shape[-1])} of {a.dtype}"
        raise TensorError(wrong, wanted, "convert it")
    if out is not None and not torch.compiler.is_compiling():
        _check_out(a, w, bias, gated, out)
    if check:
        _check_ends(ends, a.shape[0])
    ours = None if is_recorded(a, w, bias) else our_grouped_mm(a, w, ends, bias, gated, out)
    if ours is not None:
        return ours
    result = by_torch(a, w, ends, bias, gated)
    return result if out is None else out.copy_(result)


def moe_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of a mixture of SwiGLU experts for tokens that are routed already.

    Token t becomes the sum over j of ``scores[t, j] * expert(x[t])``, where the expert is ``experts[t, j]``. It
    computes ``(silu(x @ gate.t()) * (x @ up.t())) @ down.t()``. Nothing waits for the GPU, so a CUDA graph may hold the
    call.

    Args:
        x: (tokens, K), fp16 or bf16.
        gate_up: (groups, 2H, K): the H rows of gate, then those of up.
        down: (groups, K, H).
        experts: integers (tokens, top), from 0 to groups - 1.
        scores: (tokens, top), the weight of each expert.
        gate_up_bias: (groups, 2H); None: no bias.
        down_bias: (groups, K); None: no bias.

    Returns:
        (tokens, K) with the dtype of ``x``. The sum over experts is fp32.

    Raises:
        TensorError: ``experts`` and ``scores`` are not (tokens, top), or the weights do not fit each other and ``x``.
        DeviceError: the driver refused a launch.
        ToolchainMissing: torch is not installed.
    """
    import_torch()
    if experts.dim() != 2 or experts.shape != scores.shape or experts.shape[0] != x.shape[0]:
        wrong = f"experts are {tuple(experts.shape)}, scores {tuple(scores.shape)}, x is {tuple(x.shape)}"
        raise TensorError(wrong, "experts and scores of shape (tokens, top)", "pass the router's choice for each token")
    groups, doubled = gate_up.shape[:2]
    if tuple(down.shape) != (groups, x.shape[1], doubled // 2) or tuple(gate_up.shape[2:]) != (x.shape[1],):
        wrong = f"gate_up is {tuple(gate_up.shape)}, down {tuple(down.shape)}, x {tuple(x.shape)}"
        raise TensorError(wrong, "(groups, 2H, K), (groups, K, H) and (tokens, K)", "pass the weights of one layer")
    from outblas.dispatch.grouped.moe_layer import by_torch, our_moe_mlp

    operands = (x, gate_up, down, experts, scores, (gate_up_bias, down_bias))
    result = our_moe_mlp(*operands)
    return by_torch(*operands) if result is None else result


def _check_out(a: Any, w: Any, bias: Any, gated: bool, out: Any) -> None:
    from outblas.runtime.launch import may_overlap

    shape = (a.shape[0], w.shape[-1] // (2 if gated else 1))
    if tuple(out.shape) != shape or (out.dtype, out.device) != (a.dtype, a.device) or not out.is_contiguous():
        wrong = f"out is {tuple(out.shape)} of {out.dtype} on {out.device}"
        raise TensorError(wrong, f"{shape} of {a.dtype} on {a.device}, contiguous", "allocate it so, or leave it out")
    if any(t is not None and may_overlap(t, out) for t in (a, w, bias)):
        raise TensorError("out overlaps an input in memory", "separate memory", "allocate out separately")


def _check_ends(ends: Any, rows: int) -> None:
    known = [0, *ends.flatten().tolist(), rows]
    place = next((i for i, (end, after) in enumerate(zip(known, known[1:], strict=False)) if end > after), None)
    if place is not None:
        wrong = f"group {place} ends at {known[place + 1]}, and the one before at {known[place]}"
        wrong = wrong if place < len(known) - 2 else f"the last group ends at {known[place]} of {rows} rows"
        raise TensorError(wrong, f"ends that ascend from 0 to at most {rows}", "sort the rows by group, and count them")
