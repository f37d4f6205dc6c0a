"""Decide a product of two matrices, run it on its device, and record the decision in the native table.

Operands are plain matrices on one device. Callers have checked
:func:`outblas.dispatch.product_operands.why_left_to_torch`; only :func:`run_below_autograd` checks it itself.

A kernel of a batch-invariant product needs rows without gaps and addresses that are multiples of 16 bytes. Torch's own
kernel would add in another order. So other operands are copied, and the kernel is the same as for operands that lie
well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from outblas.core.errors import DeviceError
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.call_option import CallOption, option_without_promise
from outblas.dispatch.decide import Decision, Operand, why_not_half_gemm
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product_operands import aligned_operand, is_half, read_operands, why_left_to_torch

if TYPE_CHECKING:
    from typing import Any

    import torch

    from outblas.dispatch.aten_native import NativeCall

#: Numbers of rows that are tried for a product of symbolic M, beside those that the library lists.
_TRIED_M = tuple(2**exponent for exponent in range(14))

_PLAIN = CallOption()

#: Why a kernel that never failed may not be available.
_NOT_NOW = "the kernel cannot be loaded during graph capture, or its workspace does not fit in memory"


def decide_and_run(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, option: CallOption, call: NativeCall | None = None,
    by_class: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Decide and run ``a @ b``, and cache the decision. Return None if torch must compute it.

    Args:
        a: (M, K), on a CUDA device.
        b: (K, N).
        out: (M, N), the output, which is returned; None: a new tensor.
        option: of the call; the process's guarantee holds in any case.
        call: a call from the C++ kernels, which cache the decision, too.

    Raises:
        DeviceError: the guarantee is ``batch_invariant``, and no kernel of the weight's order can run.
    """
    read = read_operands(a, b, out)
    device, option = device_registry.device_state(a.device.index), option.at_least(process_guarantee())
    launch, guarantee = option
    is_invariant = guarantee == "batch_invariant" and not why_not_half_gemm(*read)
    if is_invariant and (result := _run_copies(a, b, out, read, option)) is not None:
        return result
    decision = device.decide(*read, launch, guarantee, by_class)
    result = None if decision.problem is None else device.run(decision, a, b, out)
    if result is None and is_invariant:
        reason = decision.reason if decision.problem is None else device.why_not(decision, a.device.index)
        if decision.config is not None and reason:  # it cannot be loaded: another one of the order may be
            device.library.fixed_order.left_out.add(decision.config)
            return decide_and_run(a, b, out, option, call, by_class)
        _refuse(a, b, reason or _NOT_NOW)
    if result is not None or guarantee == process_guarantee():  # torch's answer differs between guarantees
        remember(device, decision, (a, b, out, option), result, call)
    return result


def _run_copies(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None,
    read: tuple[Operand, Operand, Operand | None], option: CallOption,
) -> torch.Tensor | None:  # fmt: skip
    """Compute ``a @ b`` on copies of the operands that do not lie as kernels need. Return None if all do."""
    of_a, of_b, of_out = read
    by_columns = of_b.t.has_rows
    ready = of_a.lies_well, of_b.lies_well or of_b.t.lies_well, of_out is None or of_out.lies_well
    if all(ready):
        return None
    import torch

    a = a if ready[0] else _copied(a)
    b = b if ready[1] else _copied(b.t()).t() if by_columns else _copied(b)
    result = decide_and_run(a, b, out if ready[2] else None, option)
    if ready[2] or out is None or result is None:
        return result
    with torch.no_grad():
        return out.copy_(result)


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    import torch

    return matrix.clone(memory_format=torch.contiguous_format)


def as_copied(a: Operand, b: Operand, out: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Return the operands as a batch-invariant kernel gets them: with rows without gaps, at aligned addresses."""
    if len(b.shape) == 2 and not b.has_rows and b.t.has_rows:
        return _moved(a), b._replace(offset=0), None if out is None else _moved(out)
    return _moved(a), _moved(b), None if out is None else _moved(out)


def _moved(operand: Operand) -> Operand:
    return operand._replace(strides=(*operand.shape[1:], 1), offset=0)


def _refuse(a: torch.Tensor, b: torch.Tensor, reason: str) -> NoReturn:
    """Raise DeviceError for a half-precision product that no kernel can compute with ``batch_invariant``."""
    wrong = f"no kernel multiplies {tuple(a.shape)} by {tuple(b.shape)} with batch_invariant: {reason}"
    do = "run this matmul once before CUDA graph capture, see outblas.explain, or omit batch_invariant"
    raise DeviceError(wrong, "a kernel with the weight's summation order", do)


def run_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, option: CallOption) -> torch.Tensor | None:
    """Run ``a @ b`` by the native table if it knows the call, else by :func:`decide_and_run`, whose arguments it takes.

    Returns:
        The product; None if torch must compute it.
    """
    result = None if native_table.table is None else native_table.table.ours(a, b, out, option.code)
    if result is None:
        return decide_and_run(a, b, out, option)
    return None if result is NotImplemented else result


def run_below_autograd(
    a: torch.Tensor, b: torch.Tensor, option: CallOption = _PLAIN, call: NativeCall | None = None
) -> torch.Tensor | None:
    """Run :func:`run_product` for kernels that torch calls below autograd, after a check whose product it is.

    Args:
        a: (M, K).
        b: (K, N).
        option: as for :func:`decide_and_run`; the environment is not asked.
        call: as for :func:`decide_and_run`; with one the native table is not asked.
    """
    if native_table.table is not None and call is None:
        result = native_table.table.ours(a, b, None, option.code)
        if result is not None:
            return None if result is NotImplemented else result
    if a.device.type != device_registry.DEVICE_TYPE or b.device != a.device:
        return None
    import torch

    with torch.no_grad():  # autograd runs above; the cached decision must be the one without gradients
        reason = why_left_to_torch(a, b, None)
        if reason and option.at_least(process_guarantee()).guarantee == "batch_invariant" and is_half(a, b):
            _refuse(a, b, reason)
        return None if reason else decide_and_run(a, b, None, option, call, by_class=True)


def has_kernel(device: DeviceState, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if a kernel computes the product of two matrices in a call without a promise.

    The library has it, or the chooser for unlisted shapes. An algorithm of cuBLASLt does not count. The tensors are
    half precision (:func:`may_have_kernel`). They may lack an address (fake tensors); aligned operands are assumed.
    """
    return _has_kernel(device, aligned_operand(a), aligned_operand(b))


def has_kernel_for_some_m(device: DeviceState, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if :func:`has_kernel` is True for some number of rows of ``a``.

    Tried are the M that the library lists with this N and K, and the powers of two up to 8192.

    Args:
        a: (M, K), where M may be symbolic; K and the strides are numbers.
        b: (K, N), of numbers.
    """
    rows, weight = aligned_operand(a), aligned_operand(b)
    k, n = weight.shape
    listed = device.library.listed_m(n, k)
    return any(_has_kernel(device, rows._replace(shape=(m, k)), weight) for m in (*listed, *_TRIED_M))


def _has_kernel(device: DeviceState, a: Operand, b: Operand) -> bool:
    decision = device.decide(a, b, None, *option_without_promise())
    return decision.config is not None and not device.is_left_to_torch(decision)


def may_have_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the operands are both fp16 or both bf16, and ``a`` is on a CUDA device that may serve them.

    Neither shapes nor the library count if the device is not open: this question opens none.
    """
    return is_half(a, b) and device_registry.may_serve(a.device.index)


def remember(
    device: DeviceState,
    decision: Decision,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, CallOption],
    result: torch.Tensor | None,
    call: NativeCall | None = None,
) -> None:
    """Cache a decision in the native table, and in the C++ kernels if they asked by ``call``.

    Args:
        operands: (a, b, out, option of the call).
        result: the output; None: torch computes it.
    """
    if result is None and not device.is_left_to_torch(decision):
        return  # what could not be loaded yet, or not be used, under capture
    a, b, out, option = operands
    with device_registry.lock:
        native_table.open_once()
        table = native_table.table
        # Nothing of a device whose library has been replaced meanwhile.
        if table is not None and device_registry.devices.get(a.device.index) is device:
            answer = (None, None) if result is None else device.prepared(decision, result)
            need = 0 if result is None else device.workspace_bytes(decision)
            table.learn(a, b, out, option.code, a.element_size(), *answer)
            if call is not None:
                call.learn(a.element_size(), *answer)
            if need:
                _lend_workspace(table, device, a, need, call)


def _lend_workspace(table: Any, device: DeviceState, a: torch.Tensor, need: int, call: NativeCall | None) -> None:
    """Give a workspace of the current stream to the native table and to the asking C++ kernels, which keep it alive.

    While the stream captures, only the table gets the capture's workspace, and does not keep it alive.
    """
    import torch

    stream = torch._C._cuda_getCurrentRawStream(a.device.index)
    workspace, capture = device.workspaces.to_lend(stream, need, a.device, torch.cuda.is_current_stream_capturing)
    if workspace is not None:
        table.lend(a, stream, workspace.data_ptr(), workspace.nbytes, workspace, capture)
        if call is not None and not capture:
            call.lend(a.device.index, stream, workspace)
