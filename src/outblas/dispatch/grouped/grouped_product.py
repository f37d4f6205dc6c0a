"""A grouped product by a kernel of this package, below autograd; and the same by torch's operations."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from outblas.core.errors import ProblemError, ToolchainMissing
from outblas.core.problem import ROW_ALIGN_BYTES
from outblas.dispatch import device_registry
from outblas.dispatch.aten_products import HALF_DTYPES
from outblas.dispatch.grouped.grouped_state import GroupedState, grouped_state
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product_operands import as_plain, why_left_to_torch
from outblas.kernels.grouped.grouped_kernel import GroupedConfig
from outblas.kernels.grouped.grouped_problem import GroupedProblem


def our_grouped_mm(
    a: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    wait: bool = False,
) -> torch.Tensor | None:
    """Compute a grouped product by one kernel on the current stream; return None if torch must compute it.

    Args:
        a: (rows, K).
        w: (groups, K, N), contiguous or the transpose of a contiguous tensor.
        ends: int32 (groups), where each group ends.
        bias: (groups, N), or None.
        gated: as for :func:`outblas.grouped_mm`.
        out: (rows, columns), contiguous; None: a new tensor.
        wait: wait for the compiler if the kernel is not there yet.

    Raises:
        DeviceError: the driver refused a launch.
    """
    if a.device.type != device_registry.DEVICE_TYPE or torch_must_see(a, w, ends, bias, out=out):
        return None
    problem = problem_of(a, w, ends, bias, gated)
    if problem is None or (out is not None and out.data_ptr() % ROW_ALIGN_BYTES):
        return None
    state = grouped_state(a.device.index)
    must = gated or process_guarantee() == "batch_invariant"
    config = None if state is None else state.choose(problem, a.shape[0], must)
    if state is None or config is None or not a.shape[0]:
        return None
    return _run(state, problem, config, (a, w, ends, bias), out, wait or must)


def _run(
    state: GroupedState, problem: GroupedProblem, config: GroupedConfig, operands: tuple[Any, ...],
    out: torch.Tensor | None, wait: bool,
) -> torch.Tensor | None:  # fmt: skip
    a, w, ends, bias = operands
    index = a.device.index
    with device_registry.device_state(index).make_current(index):
        kernel = state.kernel(problem, config, wait, torch.cuda.is_current_stream_capturing())
        if kernel is None:
            return None
        shape = (a.shape[0], problem.columns)
        c = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
        stored = w.transpose(-2, -1) if problem.layout == "TN" else w
        state.run(kernel, a, stored, ends, c, bias, torch._C._cuda_getCurrentRawStream(index))
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # written behind autograd's back
    return c


def torch_must_see(a: torch.Tensor, *others: torch.Tensor | None, out: torch.Tensor | None = None) -> bool:
    """Return whether a call must go to torch whatever its shapes: traced, transformed, watched, or of subclasses.

    Gradients do not count, as the caller has seen to them. Nor does autocast, which changes no grouped product.
    """
    plain = contextlib.nullcontext() if not torch.is_autocast_enabled("cuda") else torch.autocast("cuda", enabled=False)
    with torch.no_grad(), plain:
        return any(why_left_to_torch(a, t, out) for t in (a, *others) if t is not None)


def problem_of(
    a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> GroupedProblem | None:
    """Return the problem of a call; None if no kernel takes such operands, whatever the device.

    Example: a weight of every second column, or K = 100, gives None.
    """
    if a.dtype not in HALF_DTYPES or a.dim() != 2 or w.dim() != 3 or w.shape[1] != a.shape[1] or ends.dim() != 1:
        return None
    others = (w, bias) if bias is not None else (w,)
    if any(t.dtype != a.dtype or t.device != a.device or t.data_ptr() % ROW_ALIGN_BYTES for t in (a, *others)):
        return None
    if ends.dtype != torch.int32 or ends.device != a.device or ends.shape[0] != w.shape[0] or not ends.is_contiguous():
        return None
    if bias is not None and (bias.shape != (w.shape[0], w.shape[2]) or not bias.is_contiguous()):
        return None
    layout: Any = "TN" if w.transpose(-2, -1).is_contiguous() else "NN" if w.is_contiguous() else None
    if layout is None or not a.is_contiguous():
        return None
    dtype: Any = "fp16" if a.dtype == torch.float16 else "bf16"
    try:
        return GroupedProblem(w.shape[0], w.shape[2], a.shape[1], layout, dtype, gated, bias is not None)
    except ProblemError:
        return None


def by_torch(
    a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Compute the same by torch's grouped product, with gradients; the arguments are those of :func:`our_grouped_mm`.

    The bias of a row behind the last end is that of the last group.

    Raises:
        ToolchainMissing: this torch has no grouped product.
    """
    if not hasattr(torch, "_grouped_mm"):
        wrong = f"torch {torch.__version__} has no grouped product"
        raise ToolchainMissing(wrong, "torch 2.8 or later", "update torch")
    y = torch._grouped_mm(a, w, offs=ends)
    if bias is not None:
        rows = torch.arange(a.shape[0], dtype=torch.int32, device=a.device)
        y = y + bias[torch.searchsorted(ends, rows, right=True).clamp(max=len(bias) - 1)]
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def grouped_kernel(
    keyset: Any, a: torch.Tensor, w: torch.Tensor, offs: Any, bias: Any, out_dtype: Any, theirs: Any
) -> tuple[torch.Tensor, bool]:
    """Answer a call of ``aten::_grouped_mm``: (result, whether a kernel of this package computed it).

    Args:
        keyset: torch's dispatch keys of the call.
        theirs: torch's own kernel (``torch.library.get_kernel``).
    """
    plain = offs is not None and bias is None and out_dtype in (None, a.dtype)
    result = our_grouped_mm(as_plain(a), as_plain(w), offs) if plain else None
    return (theirs.call_boxed(keyset, a, w, offs, bias, out_dtype), False) if result is None else (result, True)
