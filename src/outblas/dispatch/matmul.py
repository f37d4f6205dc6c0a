"""``outblas.matmul``: the library's kernel where there is a proven faster one; where there is none, the algorithm of
cuBLASLt that the library names; torch everywhere else.

A kernel is loaded when its first product is asked for: from the cubins that came with the package, else it is
compiled then (some 0.2 s; from then on it comes from the compile cache on disk, and in a process from memory). Each
compilation is logged at INFO by the logger ``outblas.dispatch.device_state`` and counted in :func:`status`; what
cannot be compiled warns once and is torch's. An algorithm of cuBLASLt is looked up when it is first asked for
(milliseconds, logged by ``outblas.runtime.cublaslt``).

What was decided here once is answered by ``outblas.dispatch._native`` from then on, where that is built: a call of the
same shapes, strides, dtypes, alignments and device costs a few microseconds of host time, and no Python.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from outblas.core.config import Launch, config_name
from outblas.core.switches import is_on
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.compile_trace import in_graph
from outblas.dispatch.fold import Folded, fold, unfold
from outblas.dispatch.product import decide_and_run, may_have_kernel, run_product
from outblas.dispatch.promises import launch_of_option, option_of, promise_free_option
from outblas.dispatch.tensors import (
    GRADIENT_WANTED,
    check_devices_and_overlap,
    import_torch,
    operand,
    why_left_to_torch,
)
from outblas.records.library import Library

if TYPE_CHECKING:
    import torch

    from outblas.records.library import Library


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool | None = None,
    weights: bool | None = None,
) -> torch.Tensor:
    """``a @ b`` as :func:`torch.matmul` computes it, by a tuned kernel where the library has one, or by the algorithm
    of cuBLASLt that it names where none is faster.

    Args:
        a: (M, K), or (..., M, K) or (K). b: (K, N): contiguous, or the transpose of a contiguous (N, K) weight
            (``weight.t()``); or (K). fp16 or bf16, accumulated in fp32; on one CUDA device.
        out: (..., M, N), contiguous; None: allocated.
        pdl: allow programmatic dependent launch, where the kernel's prologue overlaps its predecessor in the
            stream; safe whatever that writes.
        weights: the promise that ``b`` is a weight: nothing that is queued on the stream, or runs there (or on one that
            it waits for), at the time of the call still writes it; of a captured call, at the time of every replay, the
            graph's own nodes included. Kernels may then read it before their predecessor has ended; implies ``pdl``.
            A broken promise gives wrong results, and no error.
            Where both are None the environment says: ``OUTBLAS_WEIGHTS=1`` makes the promise for every such call,
            ``OUTBLAS_PDL=1`` allows PDL; else neither.

    Vectors and batches are as torch.matmul takes them; what is one product of two matrices by views alone
    (:func:`outblas.dispatch.fold.fold`) is decided as that. Where a gradient is wanted, the product and its gradients
    are decided in the same way (:mod:`outblas.dispatch.autograd`); under torch.compile the product is the node
    ``outblas::mm`` of the graph (:mod:`outblas.dispatch.torch_op`). Neither takes a promise: ``pdl`` and ``weights``
    are then what the environment says of PDL.

    Every other input (shape, dtype, strides, alignment, device, autocast or a transform) is handed
    to torch.matmul unchanged, and so are its errors; :func:`explain` says which way a product goes. It is
    enqueued on the device's current torch stream. While a CUDA graph is captured no kernel is loaded: make
    one call of the kind before, else the graph holds torch's kernel. Kernels and algorithms that need a workspace have
    one in the graph's memory pool (:mod:`outblas.runtime.graph_workspace`); where the capture is not torch's (made by
    the driver's own calls) or torch's allocator not its native one, the graph holds torch's kernel then.

    Raises:
        TensorError: tensors on different devices, or ``out`` shares memory with an input.
        DeviceError: the driver refused a launch, or cuBLASLt a call like one that it served before.
        UsageError: ``weights`` where ``pdl`` is False.
        ToolchainMissing: torch is not installed.
    """
    option = pdl if weights is None else option_of(pdl, weights)
    known = native_table.table_matmul
    if known is not None and not native_table.is_compiling():
        result = known(a, b, out, option)
        if result is not None:
            return result
    result = run_matmul(a, b, out, option)
    return import_torch().matmul(a, b, out=out) if result is None else result


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`matmul` of two matrices, (M, K) and (K, N); anything else is an error, as of :func:`torch.mm`.

    Raises:
        RuntimeError: not two matrices that fit, as torch.mm says. TensorError, DeviceError, ToolchainMissing: as
            :func:`matmul`.
    """
    result = native_table.table_product(a, b, out)
    if result is not None:
        return result
    matrices = getattr(a, "ndim", 0) == 2 == getattr(b, "ndim", 0)
    result = run_matmul(a, b, out, None) if matrices else None
    return import_torch().mm(a, b, out=out) if result is None else result


def run_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, option: int | None) -> torch.Tensor | None:
    """``a @ b`` by the whole decision, which the native table then remembers; None where torch is to compute it.

    Args:
        a: as of :func:`matmul`.
        b: as of :func:`matmul`.
        out: as of :func:`matmul`.
        option: place in :data:`outblas.core.config.LAUNCHES` of what the caller allows; None: what the environment
        says.
    """
    if import_torch().compiler.is_compiling():
        return in_graph(a, b) if out is None else None
    if a is None or b is None:
        return None
    reason = why_left_to_torch(a, b, out)
    if reason and reason != GRADIENT_WANTED:
        return None
    check_devices_and_overlap(a, b, out)
    if a.device.type != device_registry.DEVICE_TYPE or (reason and (out is not None or not may_have_kernel(a, b))):
        return None
    folded = fold(a, b, out)
    if folded is None:
        return None
    if reason:
        c = _with_gradients(folded)
    elif folded.a is a and folded.b is b:  # the table, asked before, does not know it
        return decide_and_run(a, b, out, option)
    else:
        c = run_product(folded.a, folded.b, folded.out, option)
    return None if c is None else unfold(c, folded.shape) if out is None else out


def _with_gradients(folded: Folded) -> torch.Tensor | None:
    """The product as autograd has to see it; None where it is no single one."""
    from outblas.dispatch.autograd import multiply_for_gradient

    return multiply_for_gradient(folded.a, folded.b) if folded.a.shape[1] == folded.b.shape[0] else None


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool | None = None,
    weights: bool | None = None,
    bias: torch.Tensor | None = None,
) -> str:
    """One line: what :func:`matmul` would use and why, or why it would be torch. Compiles nothing.

    Of :func:`outblas.linear`, give its weight as ``weight.t()``, and its bias.

    Raises:
        TensorError, UsageError: as :func:`matmul`.
    """
    launch = launch_of_option(pdl if weights is None else option_of(pdl, weights))
    import_torch()
    reason = why_left_to_torch(a, b, out)
    if reason and (reason != GRADIENT_WANTED or out is not None):
        return f"torch.matmul: {reason}"
    check_devices_and_overlap(a, b, out)
    if a.device.type != device_registry.DEVICE_TYPE:
        return f"torch.matmul: {reason + ', and ' if reason else ''}the tensors are on {a.device}"
    if bias is not None and is_on("OUTBLAS_FUSED"):
        return "one kernel by OUTBLAS_FUSED=1, else torch.addmm: outblas.dispatch.linear.why_not says which"
    if bias is not None:
        how = "as ours do with OUTBLAS_FUSED=1 only (outblas.dispatch.fused)"
        return f"torch.addmm: it adds the bias before it rounds, {how}"
    folded = fold(a, b, out)
    if folded is None:
        return f"torch.matmul: {tuple(a.shape)} by {tuple(b.shape)} is not one product of matrices without a copy"
    found = _explain_matrices(folded, launch if not reason else launch_of_option(promise_free_option()))
    ways = [] if folded.a is a and folded.b is b else [f"{tuple(a.shape)} by {tuple(b.shape)} as one product"]
    ways += ["its gradients are decided in the same way"] if reason and may_have_kernel(a, b) else []
    return "; ".join([found, *ways])


def _explain_matrices(folded: Folded, launch: Launch) -> str:
    a, b, out = folded.a, folded.b, folded.out
    device = device_registry.device_state(a.device.index)
    found = device.decide(operand(a), operand(b), None if out is None else operand(out), launch)
    if found.problem is None:
        return f"torch.matmul: {found.reason}"
    failed = device.why_not(found, a.device.index)
    if failed:
        return f"torch.matmul: {failed}"
    used = f"cuBLASLt {found.algorithm}" if found.config is None else config_name(found.config)
    return f"{used} for {found.problem.key}: {found.reason}"


def use_library(library: Library | str | os.PathLike[str] | None, device: int = 0) -> None:
    """Let :func:`matmul` use another library on a CUDA device from now on, e.g. one that ``outblas tune`` wrote.

    Args:
        library: a library or its file; None: again the packaged one, with the rows that the user has tuned.

    Raises:
        RecordError: the file cannot be used. DeviceError: no such GPU, or it is older than sm_80.
        UsageError: the library is of another GPU.
    """
    device_registry.replace_library(library, device)


def status() -> dict[str, dict[str, Any]]:
    """Per device used so far (``cuda:0``): the libraries in use (the user's before the packaged one) and the rows of
    all together, kernels loaded (and how many of them were shipped), algorithms of cuBLASLt found, calls bound, seconds
    spent compiling, why kernels or algorithms cannot be used (one line each), and what serves repeated calls:
    ``native`` (with the calls remembered, how operands are read and the products launched so, of all devices
    together), or ``python`` and why."""
    return device_registry.status()
