"""``outblas.matmul``: the library's kernel where there is a proven faster one; where there is none, the algorithm of
cuBLASLt that the library names; torch everywhere else.

A kernel is loaded when its first product is asked for: from the cubins that came with the package, else it is
compiled then (some 0.2 s; from then on it comes from the compile cache on disk, and in a process from memory). Each
compilation is logged at INFO by the logger ``outblas.device_state`` and counted in :func:`status`; what cannot be
compiled warns once and is torch's. An algorithm of cuBLASLt is looked up when it is first asked for (milliseconds,
logged by ``outblas.lt_call``).

What was decided here once is answered by ``outblas._native`` from then on, where that is built: a call of the
same shapes, strides, dtypes, alignments and device costs a few microseconds of host time, and no Python.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outblas.allowed import launch_of_option, option_of, promise_free_option
from outblas.config import LAUNCHES, Launch, config_name
from outblas.decide import Decision
from outblas.device import gpu_of_device
from outblas.device_state import DeviceState, load_kernel
from outblas.environment import is_on
from outblas.errors import DeviceError, OutblasError, TensorError, ToolchainMissing, UsageError
from outblas.fold import Folded, fold, unfold
from outblas.library import Library
from outblas.native import open_table, traced
from outblas.overlap import overlap
from outblas.tensors import GRADIENT, operand, operand_like, why_torchs
from outblas.traced import in_graph, is_half
from outblas.unlisted import chooser, identity
from outblas.user_library import preferred

if TYPE_CHECKING:
    import torch

    from outblas.aten_native import Call

#: Where our kernels run; the tests' are elsewhere.
DEVICE_TYPE = "cuda"


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
    (:func:`outblas.fold.fold`) is decided as that. Where a gradient is wanted, the product and its gradients are
    decided in the same way (:mod:`outblas.autograd`); under torch.compile the product is the node ``outblas::mm`` of
    the graph (:mod:`outblas.torch_op`). Neither takes a promise: ``pdl`` and ``weights`` are then what the
    environment says of PDL.

    Every other input (shape, dtype, strides, alignment, device, autocast or a transform) is handed
    to torch.matmul unchanged, and so are its errors; :func:`explain` says which way a product goes. It is
    enqueued on the device's current torch stream. While a CUDA graph is captured no kernel is loaded: make
    one call of the kind before, else the graph holds torch's kernel. Kernels and algorithms that need a workspace have
    one in the graph's memory pool (:mod:`outblas.capture_workspace`); where the capture is not torch's (made by the
    driver's own calls) or torch's allocator not its native one, the graph holds torch's kernel then.

    Raises:
        TensorError: tensors on different devices, or ``out`` shares memory with an input.
        DeviceError: the driver refused a launch, or cuBLASLt a call like one that it served before.
        UsageError: ``weights`` where ``pdl`` is False.
        ToolchainMissing: torch is not installed.
    """
    option = pdl if weights is None else option_of(pdl, weights)
    if _known is not None and not _is_compiling():
        result = _known(a, b, out, option)
        if result is not None:
            return result
    result = served(a, b, out, option)
    return import_torch().matmul(a, b, out=out) if result is None else result


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`matmul` of two matrices, (M, K) and (K, N); anything else is an error, as of :func:`torch.mm`.

    Raises:
        RuntimeError: not two matrices that fit, as torch.mm says. TensorError, DeviceError, ToolchainMissing: as
            :func:`matmul`.
    """
    result = known(a, b, out)
    if result is not None:
        return result
    matrices = getattr(a, "ndim", 0) == 2 == getattr(b, "ndim", 0)
    result = served(a, b, out, None) if matrices else None
    return import_torch().mm(a, b, out=out) if result is None else result


def known(a: Any, b: Any, out: Any) -> Any:
    """``a @ b`` by the native table, None for what it does not know or must not see."""
    return None if _known is None or _is_compiling() else _known(a, b, out, None)


def served(a: Any, b: Any, out: Any, option: int | None) -> Any:
    """``a @ b`` by the whole decision, which the native table then remembers; None where torch is to compute it.

    ``option``: place in :data:`outblas.config.LAUNCHES` of what the caller allows, None: what the environment says.
    """
    torch = import_torch()
    if torch.compiler.is_compiling():
        return in_graph(torch, a, b, DEVICE_TYPE) if out is None else None
    reason = why_torchs(torch, a, b, out)
    if reason and reason != GRADIENT:
        return None
    check_places(a, b, out)
    if a.device.type != DEVICE_TYPE:
        return None
    if reason:
        return _with_gradients(a, b) if out is None and may_be_ours(a, b) else None
    folded = fold(a, b, out)
    if folded is None:
        return None
    if folded.a is a and folded.b is b:  # the table, asked before, does not know it
        return _product(a, b, out, option)
    c = _remembered(folded.a, folded.b, folded.out, option)
    return None if c is None else unfold(c, folded.shape) if out is None else out


def product(a: torch.Tensor, b: torch.Tensor, option: int = 0, call: Call | None = None) -> torch.Tensor | None:
    """Our product of two matrices, None where torch is to compute it: for kernels that torch calls below autograd.

    ``option``: as of :func:`served`; the environment is not asked. ``call``: is told what the native table is.
    """
    if _table is not None and call is None:
        result = _table.ours(a, b, None, option)
        if result is not None:
            return None if result is NotImplemented else result
    if a.device.type != DEVICE_TYPE or b.device != a.device:
        return None
    torch = import_torch()
    with torch.no_grad():  # autograd is above; what is remembered is remembered without it
        return None if why_torchs(torch, a, b, None) else _product(a, b, None, option, call)


def _remembered(a: Any, b: Any, out: Any, option: int | None) -> Any:
    """:func:`_product`, by the native table where that knows the call."""
    result = None if _table is None else _table.ours(a, b, out, option)
    if result is None:
        return _product(a, b, out, option)
    return None if result is NotImplemented else result


def _product(a: Any, b: Any, out: Any, option: int | None, call: Call | None = None) -> Any:
    """Decided, run and told to the native table: of matrices that nobody but us must see."""
    device, launch = _device(a.device.index), launch_of_option(option)
    decision = device.decide(operand(a), operand(b), None if out is None else operand(out), launch)
    result = None if decision.problem is None else device.run(decision, a, b, out)
    _remember(device, decision, (a, b, out, LAUNCHES.index(launch)), result, call)
    return result


def _with_gradients(a: Any, b: Any) -> Any:
    """The product as autograd has to see it; None where it is no single one."""
    from outblas.autograd import multiply

    folded = fold(a, b)
    fits = folded is not None and folded.a.shape[1] == folded.b.shape[0]
    return unfold(multiply(folded.a, folded.b), folded.shape) if fits and folded is not None else None


def may_be_ours(a: Any, b: Any) -> bool:
    """Whether the product, or one of its gradients, may be in the library of its device."""
    return is_half(import_torch(), a, b) and serves(a.device.index)


def serves(index: int) -> bool:
    """Whether there is a library for a CUDA device."""
    device = _device(index)
    return device.gpu is not None and bool(device.library.rows)


def device_state(index: int) -> DeviceState:
    """What is kept of a CUDA device: its library, and what was decided and loaded."""
    return _device(index)


def import_torch() -> Any:
    """torch, which everything here needs. Raises ToolchainMissing."""
    try:
        import torch
    except ImportError as error:
        raise ToolchainMissing(
            "torch is not installed", "torch built for CUDA", "pip install 'outblas[gpu]'"
        ) from error
    return torch


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
    torch = import_torch()
    reason = why_torchs(torch, a, b, out)
    if reason and (reason != GRADIENT or out is not None):
        return f"torch.matmul: {reason}"
    check_places(a, b, out)
    if a.device.type != DEVICE_TYPE:
        return f"torch.matmul: {reason + ', and ' if reason else ''}the tensors are on {a.device}"
    if bias is not None and is_on("OUTBLAS_FUSED"):
        return "one kernel by OUTBLAS_FUSED=1, else torch.addmm: outblas.affine.why_not says which"
    if bias is not None:
        return "torch.addmm: it adds the bias before it rounds, as ours do with OUTBLAS_FUSED=1 only (outblas.fused)"
    folded = fold(a, b, out)
    if folded is None:
        return f"torch.matmul: {tuple(a.shape)} by {tuple(b.shape)} is not one product of matrices without a copy"
    found = _explain_matrices(folded, launch if not reason else launch_of_option(promise_free_option()))
    ways = [] if folded.a is a and folded.b is b else [f"{tuple(a.shape)} by {tuple(b.shape)} as one product"]
    ways += ["its gradients are decided in the same way"] if reason and may_be_ours(a, b) else []
    return "; ".join([found, *ways])


def _explain_matrices(folded: Folded, launch: Launch) -> str:
    a, b, out = folded.a, folded.b, folded.out
    device = _device(a.device.index)
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
    gpu = gpu_of_device(device)
    if library is None:
        chosen, used = preferred(Library.packaged(gpu.name, missing_ok=True), device)
        any_shape = chooser(gpu.name)
    else:
        any_shape = None
        chosen = library if isinstance(library, Library) else Library.load(library)
        named = "a library given" if isinstance(library, Library) else os.fspath(library)
        used = (f"{named} ({len(chosen.rows)} rows)",)
    if chosen.rows and chosen.gpu != gpu.name:
        raise UsageError(f"a library of {chosen.gpu} for {gpu.name}", "a library tuned on this GPU", "tune on it")
    with _devices_lock:
        _devices[device] = DeviceState(gpu, chosen, load_kernel, any_shape=any_shape)
        _libraries[device] = used
        if _table is not None:
            _table.forget()
        for forget in forgetters:
            forget()


def chosen(a: Any, b: Any) -> bool:
    """Whether the library has a kernel (no algorithm of cuBLASLt) for the product of two matrices, given by tensors
    without an address, which will be aligned."""
    device = _device(a.device.index)
    decision = device.decide(operand_like(a), operand_like(b), None, launch_of_option(promise_free_option()))
    return decision.config is not None and not device.unavailable(decision)


def libraries_id() -> str:
    """Of the libraries in use, and the data for other shapes: what :func:`chosen` depends on, as a digest."""
    libraries = [(i, device.library.sha(), _any_shape_id(device)) for i, device in sorted(_devices.items())]
    return hashlib.sha256(repr((promise_free_option(), libraries)).encode()).hexdigest()


def _any_shape_id(device: DeviceState) -> str:
    return "" if device.any_shape is None or device.gpu is None else identity(device.gpu.name)


def status() -> dict[str, dict[str, Any]]:
    """Per device used so far (``cuda:0``): the libraries in use (the user's before the packaged one) and the rows of
    all together, kernels loaded (and how many of them were shipped), algorithms of cuBLASLt found, calls bound, seconds
    spent compiling, why kernels or algorithms cannot be used (one line each), and what serves repeated calls:
    ``native`` (with the calls remembered, how operands are read and the products launched so, of all devices
    together), or ``python`` and why."""
    path = f"python: {_no_table}" if _no_table else "python: no product was asked for yet"
    if _table is not None:
        path = "native: {remembered} calls remembered, read by {reads_by}, {launches} launched".format(
            **_table.counts()
        )
    return {
        f"cuda:{i}": {**device.status(), "libraries": list(_libraries.get(i, ())), "host_path": path}
        for i, device in sorted(_devices.items())
    }


def check_places(a: Any, b: Any, out: Any = None) -> None:
    """Raise :class:`TensorError` for tensors on different devices or an output that overlaps an input."""
    for name, tensor in (("b", b), ("out", out)):
        if tensor is not None and tensor.device != a.device:
            raise TensorError(f"{name} is on {tensor.device}, a on {a.device}", "one device for all", "move it there")
    if out is None or out.device.type == "meta":
        return
    for name, tensor in (("a", a), ("b", b)):
        if overlap(tensor, out):
            raise TensorError(f"out shares memory with {name}", "an output of its own", "allocate out separately")


_devices: dict[int, DeviceState] = {}
#: Per device where its library comes from, in words.
_libraries: dict[int, tuple[str, ...]] = {}
#: Held over Python code, amid which a signal's handler of the same thread may multiply, too.
_devices_lock = threading.RLock()
#: The native table, opened by the first CUDA product; None: not yet, or not to be had, for the reason.
_table: Any = None
_no_table = ""
#: What :func:`matmul` asks first: the table's own, and torch's word whether it traces what must not see the table.
_known: Callable[..., Any] | None = None
_is_compiling: Callable[[], bool] = bool


#: Called when a library is replaced, by whoever else keeps what was decided.
forgetters: list[Callable[[], None]] = []


def _remember(
    device: DeviceState, decision: Decision, operands: tuple[Any, ...], result: Any, call: Call | None = None
) -> None:
    """Let the native table, and whoever asked by ``call``, answer such calls from now on; ``result`` is the output,
    None: torch's product."""
    if result is None and not device.unavailable(decision):
        return  # what could not be loaded yet, or not be used, under capture
    a, b, out, option = operands
    with _devices_lock:
        _open_table()
        # Nothing of a device whose library has been replaced meanwhile.
        if _table is not None and _devices.get(a.device.index) is device:
            answer = (None, None) if result is None else device.prepared(decision, result)
            _table.learn(a, b, out, option, a.element_size(), *answer)
            if call is not None:
                call.learn(a.element_size(), *answer)
            if result is not None and device.workspace_bytes(decision):
                _lend(device, a, call)


def _lend(device: DeviceState, a: torch.Tensor, call: Call | None = None) -> None:
    """Tell the native table, and whoever asked, the workspace of the current stream, which they then keep alive; of its
    capture, if there is one, the table alone, which keeps nothing of that."""
    import torch

    stream = torch._C._cuda_getCurrentRawStream(a.device.index)
    workspace, capture = device.workspace_of(stream, torch.cuda.is_current_stream_capturing)
    if workspace is not None:
        _table.lend(a, stream, workspace.data_ptr(), workspace.nbytes, workspace, capture)
        if call is not None and not capture:
            call.lend(a.device.index, stream, workspace)


def _open_table() -> None:
    """Once; whoever calls holds the lock."""
    global _table, _no_table, _known, _is_compiling
    if _table is not None or _no_table:
        return
    import torch

    _table, _no_table = open_table()
    if _table is not None:
        _is_compiling, _known = traced(torch), _table.matmul


def _device(index: int) -> DeviceState:
    found = _devices.get(index)
    if found is None:
        with _devices_lock:
            found = _devices.get(index) or _devices.setdefault(index, _new_device(index))
    return found


def _new_device(index: int) -> DeviceState:
    try:
        gpu = gpu_of_device(index)
    except DeviceError:  # older than sm_80: torch's
        return DeviceState(None, Library("", ()), load_kernel)
    try:
        library = Library.packaged(gpu.name, missing_ok=True)
    except OutblasError as error:
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=4)
        library, any_shape = Library(gpu.name, ()), None
    else:
        any_shape = chooser(gpu.name)
    library, _libraries[index] = preferred(library, index)
    return DeviceState(gpu, library, load_kernel, any_shape=any_shape)
