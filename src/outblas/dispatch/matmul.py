"""``outblas.matmul``: a kernel, an algorithm of cuBLASLt that the library or a prediction names, or torch.

A kernel is loaded at its first product. It comes from the shipped cubins, else from the compile cache on disk, else it
is compiled (about 0.2 s). An algorithm of cuBLASLt is looked up at its first product (milliseconds). If a kernel cannot
be compiled, one warning says so and torch serves its products. Without cuda.bindings, one warning says so and torch
serves all products. The logger ``outblas.dispatch`` reports each decision at INFO, and ``outblas.runtime`` each
compilation at DEBUG.

If ``outblas.dispatch._native`` is built, it repeats each decision without Python. A call with the same shapes,
strides, dtypes, alignments and device then costs a few microseconds of host time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from outblas.core.errors import UsageError
from outblas.core.switches import is_on
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.call_option import OPTIONS, CallOption, call_option, launch_code, option_without_promise
from outblas.dispatch.decide import why_not_half_gemm
from outblas.dispatch.guarantees.guarantee import Guarantee, demanded, process_guarantee
from outblas.dispatch.product import as_copied, decide_and_run, may_have_kernel, run_product
from outblas.dispatch.product_operands import (
    GRADIENT_WANTED,
    ProductOperands,
    check_overlap,
    fold,
    import_torch,
    is_half,
    read_operands,
    unfold,
    why_left_to_torch,
    why_not_one_product,
)
from outblas.runtime.full_precision import full_precision_reductions

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
    accurate: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``a @ b``, computed by a tuned kernel if the library has a faster proven one.

    If no kernel is faster, a cuBLASLt algorithm named by the library or a prediction may run. All other inputs fall
    back unchanged to :func:`torch.matmul`, which also raises its own errors. Reasons include shape, dtype, strides,
    alignment, devices, autocast and transforms. :func:`explain` names the code that a call runs.

    Vectors and batches behave as in torch.matmul. Those that views alone turn into a single matrix product
    (:func:`outblas.dispatch.product_operands.fold`) may use a kernel. The call is enqueued on the device's current
    torch stream.

    If a gradient is needed, the matmul and its gradients are dispatched in the same way
    (:mod:`outblas.dispatch.autograd`). Under torch.compile, the call becomes the node ``outblas::mm``
    (:mod:`outblas.dispatch.torch_op`). Both ignore ``pdl`` and ``weights``; each variable named below allows PDL.

    No kernel is loaded during CUDA graph capture: run one such call before, or the graph keeps torch's kernel. A kernel
    or algorithm that needs a workspace takes it from the graph's memory pool (:mod:`outblas.runtime.workspace`). That
    requires torch's capture and torch's native allocator; otherwise the graph keeps torch's kernel.

    Args:
        a: (M, K), (..., M, K) or (K), fp16 or bf16, on a CUDA device.
        b: (K, N) or (K), same dtype and device; contiguous, or the transpose of a contiguous (N, K) weight
            (``weight.t()``).
        out: (..., M, N), contiguous; None: a new tensor.
        pdl: allow programmatic dependent launch: the kernel's prologue overlaps its predecessor in the stream. Always
            safe. None: True if ``OUTBLAS_PDL=1`` or ``OUTBLAS_WEIGHTS=1``.
        weights: guarantee that ``b`` is constant, so a kernel may read it before its predecessor ends. Implies ``pdl``.
            No queued or running work may write ``b``, on this stream or on any stream that it depends on. In a CUDA
            graph, this must hold at every replay, including for the graph's own nodes. A violation gives wrong results
            without an error. None, with ``pdl`` None: True if ``OUTBLAS_WEIGHTS=1``.
        accurate: never round a partial sum to half precision, in torch's matmuls and in gradients, too.
        batch_invariant: compute a row of ``a`` with the same bits in every batch, by kernels with one fixed summation
            order per weight. Implies ``accurate``. There is no fallback to torch: DeviceError gives the reason if no
            kernel can compute the matmul. :func:`outblas.enable` can set both process-wide; False does not override it.

    Returns:
        The product with torch.matmul's shape and dtype, accumulated in fp32; ``out`` if given.

    Raises:
        TensorError: ``out`` shares memory with an input.
        DeviceError: the driver refused a launch, or cuBLASLt refused a call like one that it accepted before.
            With ``batch_invariant``, also if no kernel can compute the matmul.
        UsageError: ``weights`` is True and ``pdl`` is False. Or ``batch_invariant`` is given for operands that are not
            a single product of half-precision matrices on a CUDA GPU.
        ToolchainMissing: torch is not installed.
    """
    option = None
    if accurate or batch_invariant:
        guarantee = demanded(accurate, batch_invariant)
        if import_torch().compiler.is_compiling():
            return _guaranteed_in_graph(a, b, out, guarantee)
        option = call_option(pdl, weights, guarantee)
        code: int | None = option.code
    else:
        code = (pdl if pdl is None else bool(pdl)) if weights is None else launch_code(pdl, weights)
    known = native_table.table_matmul
    if known is not None and not native_table.is_compiling():
        result = known(a, b, out, code)
        if result is not None:
            return result
    result = run_matmul(a, b, out, None if code is None else OPTIONS[code])
    return _torch_matmul(a, b, out, option) if result is None else result


def _guaranteed_in_graph(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, guarantee: Guarantee
) -> torch.Tensor:
    """Return the product as an operator of the graph; raise UsageError for one that only torch could trace."""
    result = _in_graph(a, b, guarantee) if out is None else None
    if result is not None:
        return result
    if guarantee == "batch_invariant" or (a.device.type == device_registry.DEVICE_TYPE and is_half(a, b)):
        raise UsageError(
            f"the graph cannot represent this traced call with {guarantee}=True",
            "one matmul of half-precision matrices on a CUDA GPU, without out, autocast or export",
            "exclude the call from the graph, e.g. with torch.compiler.disable",
        )
    return import_torch().matmul(a, b, out=out)


def _torch_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, option: CallOption | None
) -> torch.Tensor:
    """Call torch.matmul; raise UsageError if it would break the guarantee.

    Without ``out`` torch's products end in the operators that ``enable(batch_invariant=True)`` replaces.

    Args:
        option: of a call with a guarantee of its own; None: that of the process holds, which has set torch's switches.
    """
    refused = _why_refused(a, b, out, process_guarantee() if option is None else option.guarantee)
    if refused:
        do = "use torch.matmul under outblas.enable(batch_invariant=True), which covers batches and autocast"
        raise UsageError(refused, "one matmul of plain fp16 or bf16 tensors on a CUDA GPU", do)
    if option is None:
        return import_torch().matmul(a, b, out=out)
    with full_precision_reductions():
        return import_torch().matmul(a, b, out=out)


def _why_refused(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, guarantee: Guarantee) -> str:
    """Return why torch may not compute a product under a guarantee; empty if it may."""
    if guarantee != "batch_invariant" or (process_guarantee() == guarantee and out is None):
        return ""
    reason = why_not_one_product(a, b, out)
    return reason and f"batch_invariant is not possible: {reason}"


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return :func:`matmul` of two matrices, (M, K) and (K, N): a new tensor, or ``out`` if given.

    Torch computes matmuls without a matching kernel, e.g. on the CPU. Invalid operands raise the errors of
    :func:`torch.mm`.

    Raises:
        RuntimeError: the operands are not two matrices with matching shapes.
        TensorError: as for :func:`matmul`.
        DeviceError: as for :func:`matmul`.
        ToolchainMissing: torch is not installed.
    """
    result = native_table.table_product(a, b, out)
    if result is not None:
        return result
    matrices = getattr(a, "ndim", 0) == 2 == getattr(b, "ndim", 0)
    result = run_matmul(a, b, out) if matrices else None
    return import_torch().mm(a, b, out=out) if result is None else result


def run_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, option: CallOption | None = None
) -> torch.Tensor | None:
    """Decide and run ``a @ b``; the native table then repeats the decision. Return None if torch must compute it.

    Args:
        option: of the call; None: the environment's. The process's guarantee holds in any case.
    """
    if import_torch().compiler.is_compiling():
        return _in_graph(a, b, process_guarantee()) if out is None else None
    if a is None or b is None:
        return None
    reason = why_left_to_torch(a, b, out)
    if reason and reason != GRADIENT_WANTED:
        return None
    check_overlap(a, b, out)
    if a.device.type != device_registry.DEVICE_TYPE:
        return None
    option = call_option() if option is None else option.at_least(process_guarantee())
    guarantee = option.guarantee
    if reason and (out is not None or not is_half(a, b)):
        return None
    if reason and guarantee == "none" and not device_registry.may_serve(a.device.index):
        return None
    operands = fold(a, b, out, guarantee == "batch_invariant")
    if operands is None:
        return None
    if reason:
        if operands.a.shape[1] != operands.b.shape[0]:
            return None
        from outblas.dispatch.autograd import ProductFunction

        c = ProductFunction.apply(operands.a, operands.b, True, option_without_promise(guarantee))
    elif operands.a is a and operands.b is b:  # the table, asked before, does not know it
        return decide_and_run(a, b, out, option)
    else:
        c = run_product(operands.a, operands.b, operands.out, option)
    return None if c is None else unfold(c, operands.shape) if out is None else out


def _in_graph(a: torch.Tensor, b: torch.Tensor, guarantee: Guarantee) -> torch.Tensor | None:
    """Return the product of a traced call as an operator that torch.compile keeps.

    A batch (..., M, K) times one matrix (K, N) counts as a single product; a batch times a batch does not. Return None
    if torch must trace it: outside of compilation, in an export, under autocast, or unless both are half precision on
    one GPU.
    """
    if not _is_kept(a, b):
        return None
    from outblas.dispatch.torch_op import MM

    operands = fold(a, b)
    return None if operands is None else unfold(MM[guarantee](operands.a, operands.b), operands.shape)


def _is_kept(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if dynamo, tracing the call, should keep the operator.

    An exported program must not need this package.
    """
    import torch

    # Not is_exporting(): of that, dynamo before torch 2.13 makes True, whether a program is exported or not.
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)  # from torch 2.7 on
    if not torch.compiler.is_dynamo_compiling() or exporting or torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided for t in (a, b)):
        return False
    place = device_registry.DEVICE_TYPE
    if a.device.type != place or b.device != a.device or torch.is_autocast_enabled(place):
        return False
    return is_half(a, b)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool | None = None,
    weights: bool | None = None,
    accurate: bool = False,
    batch_invariant: bool = False,
    bias: torch.Tensor | None = None,
) -> str:
    """Return one line that names the code that :func:`matmul` would run, and the reason. Compiles nothing.

    With ``batch_invariant``, the line names the kernel's summation order, or the error that the call would raise. For
    :func:`outblas.linear`, pass its weight as ``weight.t()``. Arguments other than ``bias`` are those of
    :func:`matmul`.

    Args:
        bias: bias of :func:`outblas.linear`; None: no bias.

    Raises:
        TensorError: as for :func:`matmul`.
        UsageError: as for :func:`matmul`.
    """
    option = call_option(pdl, weights, demanded(accurate, batch_invariant))
    import_torch()
    guarantee = option.guarantee
    invariant = guarantee == "batch_invariant"
    reason = why_left_to_torch(a, b, out)
    left = bool(reason) and (reason != GRADIENT_WANTED or out is not None)
    if not left:
        check_overlap(a, b, out)
    refused = _why_refused(a, b, out, guarantee)
    if refused:
        return f"UsageError: {refused}"
    if left:
        return f"torch.matmul: {reason}"
    if a.device.type != device_registry.DEVICE_TYPE:
        return f"torch.matmul: {reason + ', and ' if reason else ''}the tensors are on {a.device}"
    if bias is not None and not invariant and is_on("OUTBLAS_FUSED"):
        return "one kernel by OUTBLAS_FUSED=1, else torch.addmm: outblas.dispatch.linear.why_not says which"
    if bias is not None and not invariant:
        how = "as ours do in CUDA graphs only, or with OUTBLAS_FUSED=1 (outblas.dispatch.fused)"
        return f"torch.addmm: it adds the bias before it rounds, {how}"
    operands = fold(a, b, out, invariant)
    if operands is None:
        return f"torch.matmul: {tuple(a.shape)} by {tuple(b.shape)} is not one product of matrices without a copy"
    found = _explain_matrices(operands, option_without_promise(guarantee) if reason else option)
    ways = [] if operands.a is a and operands.b is b else [f"{tuple(a.shape)} by {tuple(b.shape)} as one product"]
    ways += ["the bias is added afterwards"] if bias is not None else []
    ways += ["its gradients are decided in the same way"] if reason and may_have_kernel(a, b) else []
    return "; ".join([found, *ways])


def _explain_matrices(operands: ProductOperands, option: CallOption) -> str:
    index, guarantee = operands.a.device.index, option.guarantee
    device = device_registry.device_state(index)
    instead = {"none": "torch.matmul", "accurate": "torch.matmul with fp32 sums"}
    read = read_operands(operands.a, operands.b, operands.out)
    if guarantee == "batch_invariant":
        instead[guarantee] = "torch.matmul" if why_not_half_gemm(*read) else "DeviceError"
        read = as_copied(*read)
    found = device.decide(*read, *option)
    if found.problem is None:
        return f"{instead[guarantee]}: {found.reason}"
    failed = device.why_not(found, index)
    if failed:
        return f"{instead[guarantee]}: {failed}"
    return str(found)


def use_library(library: Library | str | os.PathLike[str] | None, device: int = 0) -> None:
    """Make :func:`matmul` use another library on a CUDA device, e.g. one written by ``outblas tune``.

    Args:
        library: a library, or its file. None: the default, i.e. the packaged library with the user's tuned rows.
        device: CUDA index.

    Raises:
        RecordError: the file cannot be used.
        DeviceError: the GPU does not exist, or is older than sm_80.
        UsageError: the library is for another GPU.
    """
    device_registry.replace_library(library, device)


def use_workload(workload: str | None) -> None:
    """Declare how matmuls of this process follow each other, on all devices.

    The workload matters only if the library has a second winner for it, in calls without ``pdl`` and ``weights``. Calls
    with ``batch_invariant`` ignore it. Accuracy is the same for all workloads. A matmul that another thread dispatches
    during this call may still use the previous workload.

    Args:
        workload: ``stream``: matmuls follow each other closely. ``single``: each matmul is a separate request.
            ``cold``: operands are not in the L2 cache. None: ``OUTBLAS_WORKLOAD``, else ``stream``.

    Raises:
        UsageError: the workload is unknown.
    """
    device_registry.replace_workload(workload)


def status() -> dict[str, dict[str, Any]]:
    """Return the state of each device used so far, by name (``cuda:0``).

    Each value reports:

    - the libraries in use, the user library first, with their numbers of rows and intervals;
    - the loaded kernels, and how many of them were shipped precompiled;
    - the cuBLASLt algorithms found, and the number of bound calls;
    - the compile time, in seconds;
    - the reasons why kernels or algorithms cannot be used, one line each;
    - the workload (:func:`use_workload`);
    - the host path of repeated calls: ``native`` with its counts over all devices, or ``python`` and the reason.
    """
    return device_registry.status()
