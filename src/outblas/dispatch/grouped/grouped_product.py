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
from outblas.dispatch.product_operands import as_plain, dtype_name, why_left_to_torch
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.grouped_launch import GroupedKernel


def our_grouped_mm(
    a: torch.Tensor,
    w: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute a grouped product by one kernel on the current stream; return None if torch must compute it.

    Args:
        a: (rows, K).
        w: (groups, K, N), contiguous or the transpose of a contiguous tensor.
        ends: int32 (groups), where each group ends.
        bias: (groups, N), or None.
        gated: as for :func:`outblas.grouped_mm`.
        out: (rows, columns), contiguous; None: a new tensor.

    Raises:
        DeviceError: the driver refused a launch.
    """
    if a.device.type != device_registry.DEVICE_TYPE or torch_must_see(a, w, ends, bias, out=out):
        return None
    problem = problem_of(a, w, ends, bias, gated)
    if problem is None or not a.shape[0] or (out is not None and out.data_ptr() % ROW_ALIGN_BYTES):
        return None
    index = a.device.index
    state = grouped_state(index)
    if state is None:
        return None
    with device_registry.device_state(index).make_current(index):
        kernel = ready_kernel(state, problem, a.shape[0], gated)
        if kernel is None:
            return None
        c = launch(state, kernel, a, w, ends, bias, out)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # written behind autograd's back
    return c


def ready_kernel(
    state: GroupedState, problem: GroupedProblem, rows: int, must: bool, wait: bool = False
) -> GroupedKernel | None:
    """Return a loaded kernel for a product in the current device and context; None if torch must compute it.

    Args:
        rows: rows of all groups together.
        must: choose a kernel also where torch is as fast, and wait for it.
        wait: wait for the compiler if the kernel is not there yet.
    """
    must = must or process_guarantee() == "batch_invariant"
    config = state.choose(problem, rows, must)
    if config is None:
        return None
    return state.kernel(problem, config, wait or must, torch.cuda.is_current_stream_capturing())


def launch(
    state: GroupedState, kernel: GroupedKernel, a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor | None = None, dependent: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Enqueue a kernel on the current stream and return its output; the operands are those of :func:`our_grouped_mm`.

    ``dependent`` is that of :meth:`outblas.runtime.grouped_launch.GroupedKernel.bind`.

    Raises:
        DeviceError: the driver refused the launch.
    """
    c = torch.empty((a.shape[0], kernel.problem.columns), dtype=a.dtype, device=a.device) if out is None else out
    stored = w.transpose(-2, -1) if kernel.problem.layout == "TN" else w
    state.run(kernel, a, stored, ends, c, bias, torch._C._cuda_getCurrentRawStream(a.device.index), dependent)
    return c


def is_recorded(*operands: torch.Tensor | None) -> bool:
    """Return whether autograd or torch.compile records a call with these operands, so that torch must compute it."""
    wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    return wants_gradient or torch.compiler.is_compiling()


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
    if a.dim() != 2 or w.dim() != 3 or (a.dtype, a.device, a.shape[1]) != (w.dtype, w.device, w.shape[1]):
        return None
    if not a.is_contiguous() or a.data_ptr() % ROW_ALIGN_BYTES:
        return None
    if (ends.dtype, ends.device, tuple(ends.shape)) != (torch.int32, a.device, (w.shape[0],)):
        return None
    return problem_of_weights(w, bias, gated) if ends.is_contiguous() else None


def problem_of_weights(w: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> GroupedProblem | None:
    """Return the problem of all calls with a weight (groups, K, N) and a bias; None if no kernel takes them."""
    given = (w,) if bias is None else (w, bias)
    if w.dtype not in HALF_DTYPES or w.dim() != 3:
        return None
    if any((t.dtype, t.device) != (w.dtype, w.device) or t.data_ptr() % ROW_ALIGN_BYTES for t in given):
        return None
    if bias is not None and (bias.shape != (w.shape[0], w.shape[2]) or not bias.is_contiguous()):
        return None
    layout: Any = "TN" if w.transpose(-2, -1).is_contiguous() else "NN" if w.is_contiguous() else None
    if layout is None:
        return None
    dtype: Any = dtype_name(w.dtype)
    try:
        return GroupedProblem(w.shape[0], w.shape[2], w.shape[1], layout, dtype, gated, bias is not None)
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
