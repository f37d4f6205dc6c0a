"""``outblas.matmul``: a kernel, an algorithm of cuBLASLt that the library or a prediction names, or torch.

A kernel is loaded at its first product. It comes from the shipped cubins, else from the compile cache on disk, else it
is compiled (about 0.2 s). The logger ``outblas.dispatch.device_state`` reports each compilation at INFO, and
:func:`status` counts them. If a kernel cannot be compiled, one warning says so and torch serves its products. Without
cuda.bindings, one warning says so and torch serves all products. An algorithm of cuBLASLt is looked up at its first
product (milliseconds, logged by ``outblas.runtime.cublaslt``).

If ``outblas.dispatch._native`` is built, it repeats each decision without Python. A call with the same shapes,
strides, dtypes, alignments and device then costs a few microseconds of host time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.switches import is_on
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.call_option import OPTIONS, CallOption, call_option, launch_code, option_without_promise
from outblas.dispatch.compile_trace import in_graph
from outblas.dispatch.fold import Folded, fold, unfold
from outblas.dispatch.guarantees.aligned_copies import as_copied, is_not_half_gemm
from outblas.dispatch.guarantees.full_precision import full_precision_reductions
from outblas.dispatch.guarantees.guarantee import Guarantee, demanded, process_guarantee
from outblas.dispatch.product import decide_and_run, may_have_kernel, run_product
from outblas.dispatch.tensors import (
    GRADIENT_WANTED,
    check_overlap,
    import_torch,
    is_half,
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
    accurate: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``a @ b``, computed by a tuned kernel if the library has a proven faster one.

    If no kernel is faster, an algorithm of cuBLASLt may run, which the library or a prediction names. Every input that
    neither takes goes unchanged to :func:`torch.matmul`, which also raises its own errors. That concerns shape, dtype,
    strides, alignment, devices, autocast and transforms. :func:`explain` says which way a product goes.

    Vectors and batches have torch.matmul's meaning; those that are one product of two matrices by views alone
    (:func:`outblas.dispatch.fold.fold`) may use a kernel. The call is enqueued on the device's current torch stream.

    If a gradient is wanted, the product and its gradients are decided in the same way
    (:mod:`outblas.dispatch.autograd`). Under torch.compile the product becomes the node ``outblas::mm``
    (:mod:`outblas.dispatch.torch_op`). Both ignore ``pdl`` and ``weights`` and follow ``OUTBLAS_PDL`` alone.

    While a CUDA graph is captured no kernel is loaded: run one such call before, else the graph holds torch's kernel. A
    kernel or algorithm that needs a workspace takes it from the graph's memory pool
    (:mod:`outblas.runtime.workspace`). That needs torch's capture and torch's native allocator; without them the
    graph holds torch's kernel.

    Args:
        a: (M, K), (..., M, K) or (K), fp16 or bf16, on a CUDA device.
        b: (K, N) or (K), same dtype and device; contiguous, or the transpose of a contiguous (N, K) weight
            (``weight.t()``).
        out: (..., M, N), contiguous; None: a new tensor.
        pdl: allow programmatic dependent launch: the kernel's prologue overlaps its predecessor in the stream. Always
            safe. None: True if ``OUTBLAS_PDL=1`` or ``OUTBLAS_WEIGHTS=1``.
        weights: promise that ``b`` is constant, so that a kernel may read it before its predecessor ends; implies
            ``pdl``. No queued or running work may write ``b``, on this stream or on one whose end it awaits.
            In a CUDA graph this must hold at every replay, including the graph's own nodes. A broken promise gives
            wrong results without an error. None, with ``pdl`` None: True if ``OUTBLAS_WEIGHTS=1``.
        accurate: round no partial sum to half precision, also where torch computes the product, and in gradients.
        batch_invariant: give a row of ``a`` the same bits in every batch, by kernels of one order of summation per
            weight. Implies ``accurate``. Never torch computes such a product: DeviceError says why no kernel can.
            :func:`outblas.enable` sets both for the whole process; False here does not unset them.

    Returns:
        The product with torch.matmul's shape and dtype, accumulated in fp32; ``out`` if it was given.

    Raises:
        TensorError: ``out`` shares memory with an input.
        DeviceError: the driver refused a launch, or cuBLASLt a call like one that it served before. Or no kernel can
            compute the product with ``batch_invariant``.
        UsageError: ``weights`` is true and ``pdl`` is False. Or ``batch_invariant`` is given for operands that are not
            one product of half-precision matrices on a CUDA GPU.
        ToolchainMissing: torch is not installed.
    """
    if accurate or batch_invariant:
        return guaranteed_matmul(a, b, out, pdl, weights, demanded(accurate, batch_invariant))
    code = (pdl if pdl is None else bool(pdl)) if weights is None else launch_code(pdl, weights)
    known = native_table.table_matmul
    if known is not None and not native_table.is_compiling():
        result = known(a, b, out, code)
        if result is not None:
            return result
    result = run_matmul(a, b, out, None if code is None else OPTIONS[code])
    return _torch_matmul(a, b, out, process_guarantee()) if result is None else result


def guaranteed_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, pdl: bool | None, weights: bool | None,
    guarantee: Guarantee,
) -> torch.Tensor:  # fmt: skip
    """Return ``a @ b`` with a guarantee of its own.

    Args:
        a: as for :func:`matmul`.
        b: as for :func:`matmul`.
        out: as for :func:`matmul`.
        pdl: as for :func:`matmul`.
        weights: as for :func:`matmul`.
        guarantee: ``accurate`` or ``batch_invariant``.

    Raises:
        UsageError: as for :func:`matmul`.
        DeviceError: as for :func:`matmul`.
    """
    if import_torch().compiler.is_compiling():
        return _guaranteed_in_graph(a, b, out, guarantee)
    option = call_option(pdl, weights, guarantee)
    known = native_table.table_matmul
    result = None if known is None else known(a, b, out, option.code)
    result = run_matmul(a, b, out, option) if result is None else result
    if result is not None:
        return result
    with full_precision_reductions():
        return _torch_matmul(a, b, out, option.guarantee)


def _guaranteed_in_graph(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, guarantee: Guarantee
) -> torch.Tensor:
    """Return the product as an operator of the graph; raise UsageError for one that only torch could trace."""
    result = in_graph(a, b, guarantee) if out is None else None
    if result is not None:
        return result
    if guarantee == "batch_invariant" or (a.device.type == device_registry.DEVICE_TYPE and is_half(a, b)):
        raise UsageError(
            f"{guarantee}=True in a traced call that the graph cannot keep",
            "one product of half-precision matrices on a CUDA GPU, without out, autocast or export",
            "keep the call out of the graph, e.g. by torch.compiler.disable",
        )
    return import_torch().matmul(a, b, out=out)


def _torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, guarantee: Guarantee) -> torch.Tensor:
    """Call torch.matmul; raise UsageError if it would break the guarantee.

    Without ``out`` torch's products end in the operators that ``enable(batch_invariant=True)`` replaces.
    """
    refused = _why_refused(a, b, out, guarantee)
    if refused:
        raise UsageError(
            refused,
            "one product of fp16 or bf16 matrices on a CUDA GPU, of plain tensors",
            "use torch.matmul under outblas.enable(batch_invariant=True), which covers batches and autocast",
        )
    return import_torch().matmul(a, b, out=out)


def _why_refused(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, guarantee: Guarantee) -> str:
    """Return why torch may not compute a product under a guarantee; empty if it may."""
    if guarantee != "batch_invariant" or (process_guarantee() == guarantee and out is None):
        return ""
    reason = _why_not_invariant(a, b, out)
    return reason and f"batch_invariant for {reason}"


def _why_not_invariant(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> str:
    """Return why no kernel keeps a product batch-invariant; empty if torch makes zeros or an error of the operands."""
    if not all(isinstance(t, import_torch().Tensor) and t.numel() for t in (a, b)):
        return ""
    if a.device.type != device_registry.DEVICE_TYPE or not is_half(a, b):
        return f"{a.dtype} and {b.dtype} on {a.device}"
    reason = why_left_to_torch(a, b, out)
    if reason and reason != GRADIENT_WANTED:
        return reason
    folded = fold(a, b, out)
    if folded is None:
        return f"{tuple(a.shape)} by {tuple(b.shape)}, which is not one product of matrices without a copy"
    if out is None or (tuple(out.shape) == folded.shape and out.dtype == a.dtype):
        return ""
    return f"an output of shape {tuple(out.shape)} and {out.dtype}"


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return :func:`matmul` of two matrices, (M, K) and (K, N): the new product, or ``out`` if it was given.

    torch computes what no kernel fits, e.g. on the CPU. Other operands raise the errors of :func:`torch.mm`.

    Raises:
        RuntimeError: the operands are not two matrices that fit.
        TensorError: as :func:`matmul`.
        DeviceError: as :func:`matmul`.
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
        a: as for :func:`matmul`.
        b: as for :func:`matmul`.
        out: as for :func:`matmul`.
        option: of the call; None: the environment's. The process's guarantee holds in any case.
    """
    if import_torch().compiler.is_compiling():
        return in_graph(a, b, process_guarantee()) if out is None else None
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
    if reason and (out is not None or not (may_have_kernel(a, b) or (guarantee != "none" and is_half(a, b)))):
        return None
    a = _with_rows(a, b, guarantee)
    folded = fold(a, b, out)
    if folded is None:
        return None
    if reason:
        c = _with_gradients(folded, option_without_promise(guarantee))
    elif folded.a is a and folded.b is b:  # the table, asked before, does not know it
        return decide_and_run(a, b, out, option)
    else:
        c = run_product(folded.a, folded.b, folded.out, option)
    return None if c is None else unfold(c, folded.shape) if out is None else out


def _with_rows(a: torch.Tensor, b: torch.Tensor, guarantee: Guarantee) -> torch.Tensor:
    """Return ``a``, made contiguous for a batch-invariant product with one weight; torch would copy it, too."""
    return a.contiguous() if guarantee == "batch_invariant" and a.dim() > 2 and b.dim() <= 2 else a


def _with_gradients(folded: Folded, option: CallOption) -> torch.Tensor | None:
    """Compute the product as an operation that autograd records.

    Return None if it is not a single product of matrices.
    """
    from outblas.dispatch.autograd import multiply_for_gradient

    return multiply_for_gradient(folded.a, folded.b, option) if folded.a.shape[1] == folded.b.shape[0] else None


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
    """Return one line: the way that :func:`matmul` would take, and the reason. Compiles nothing.

    With ``batch_invariant`` the line names the order of summation of the kernel, or the error that the call would
    raise. For :func:`outblas.linear` pass its weight as ``weight.t()``, and its bias.

    Args:
        a: as for :func:`matmul`.
        b: as for :func:`matmul`.
        out: as for :func:`matmul`.
        pdl: as for :func:`matmul`.
        weights: as for :func:`matmul`.
        accurate: as for :func:`matmul`.
        batch_invariant: as for :func:`matmul`.
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
        a = _with_rows(a, b, guarantee)
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
        how = "as ours do in CUDA graphs only, or with OUTBLAS_FUSED=1 (outblas.dispatch.fusion.fused)"
        return f"torch.addmm: it adds the bias before it rounds, {how}"
    folded = fold(a, b, out)
    if folded is None:
        return f"torch.matmul: {tuple(a.shape)} by {tuple(b.shape)} is not one product of matrices without a copy"
    found = _explain_matrices(folded, option_without_promise(guarantee) if reason else option)
    ways = [] if folded.a is a and folded.b is b else [f"{tuple(a.shape)} by {tuple(b.shape)} as one product"]
    ways += ["the bias is added afterwards"] if bias is not None else []
    ways += ["its gradients are decided in the same way"] if reason and may_have_kernel(a, b) else []
    return "; ".join([found, *ways])


def _explain_matrices(folded: Folded, option: CallOption) -> str:
    a, b, out = folded.a, folded.b, folded.out
    device, guarantee = device_registry.device_state(a.device.index), option.guarantee
    instead = {"none": "torch.matmul", "accurate": "torch.matmul with fp32 sums"}
    operands = operand(a), operand(b), None if out is None else operand(out)
    if guarantee == "batch_invariant":
        operands = as_copied(*operands)
        instead[guarantee] = "torch.matmul" if is_not_half_gemm(a, b, out) else "DeviceError"
    found = device.decide(*operands, *option)
    if found.problem is None:
        return f"{instead[guarantee]}: {found.reason}"
    failed = device.why_not(found, a.device.index)
    if failed:
        return f"{instead[guarantee]}: {failed}"
    used = f"cuBLASLt {found.algorithm}" if found.config is None else config_name(found.config)
    return f"{used} for {found.problem.key}: {found.reason}"


def use_library(library: Library | str | os.PathLike[str] | None, device: int = 0) -> None:
    """Let :func:`matmul` use another library on a CUDA device from now on, e.g. one that ``outblas tune`` wrote.

    Args:
        library: a library or its file; None: again the packaged one, with the rows that the user has tuned.
        device: CUDA index.

    Raises:
        RecordError: the file cannot be used.
        DeviceError: no such GPU, or it is older than sm_80.
        UsageError: the library is of another GPU.
    """
    device_registry.replace_library(library, device)


def use_workload(workload: str | None) -> None:
    """Say how the products of this process follow each other, from now on, on all devices.

    It matters only where the library has a second winner for that workload, in calls without ``pdl`` and ``weights``.
    Calls under ``batch_invariant`` ignore it. Results have the same accuracy under each workload. A product that
    another thread decides during this call may keep the former workload.

    Args:
        workload: ``stream``: products follow each other closely. ``single``: each product is a request by itself.
            ``cold``: operands are not in the L2 cache. None: as ``OUTBLAS_WORKLOAD`` says, else ``stream``.

    Raises:
        UsageError: another workload.
    """
    device_registry.replace_workload(workload)


def status() -> dict[str, dict[str, Any]]:
    """Return the state of each device used so far, by name (``cuda:0``).

    Each value says:

    - the libraries in use, the user's before the packaged one, and the number of their rows and intervals;
    - the kernels loaded, and how many of them were shipped;
    - the algorithms of cuBLASLt found, and the calls bound;
    - the seconds spent compiling;
    - why kernels or algorithms cannot be used, one line each;
    - the workload (:func:`use_workload`);
    - the host path of repeated calls: ``native`` with its counts over all devices, or ``python`` and the reason.
    """
    return device_registry.status()
