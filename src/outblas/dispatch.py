"""``outblas.matmul``: the library's kernel where there is a proven faster one, torch everywhere else.

A kernel is compiled when its first product is asked for (some 0.2 s; from then on the cubin comes from
the compile cache on disk, and in a process from memory). Each compilation is logged at INFO by the logger
``outblas.dispatch`` and counted in :func:`status`; what cannot be compiled warns once and is torch's.

What was decided here once is answered by ``outblas._native`` from then on, where that is built: a call of the
same shapes, strides, dtypes, alignments and device costs a few microseconds of host time, and no Python.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outblas.config import KernelConfig, config_name
from outblas.decide import Decision, Operand, decide
from outblas.errors import CompileError, DeviceError, OutblasError, TensorError, ToolchainMissing, UsageError
from outblas.geometry import workspace_bytes
from outblas.library import Library
from outblas.native import open_table
from outblas.overlap import overlap
from outblas.problem import Problem
from outblas.roofline import Gpu
from outblas.source import kernel_kind
from outblas.space import gpu_of_device
from outblas.tensors import operand, why_torchs
from outblas.workspace import StreamWorkspaces

if TYPE_CHECKING:
    import torch

#: Decisions and bound calls kept per device; the least recently used go first.
KEPT_DECISIONS, KEPT_CALLS = 4096, 4096
_LOG = logging.getLogger(__name__)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool | None = None
) -> torch.Tensor:
    """``a @ b`` as :func:`torch.matmul` computes it, by a tuned kernel where the library has one.

    Args:
        a: (M, K). b: (K, N): contiguous, or the transpose of a contiguous (N, K) weight (``weight.t()``).
            fp16 or bf16, accumulated in fp32; on one CUDA device.
        out: (M, N), contiguous; None: allocated.
        pdl: allow programmatic dependent launch, where the kernel's prologue overlaps its predecessor in the
            stream; None: the environment's ``OUTBLAS_PDL=1``, else not.

    Every other input (shape, dtype, strides, alignment, device, a gradient or a trace to be kept) is handed
    to torch.matmul unchanged, and so are its errors; :func:`explain` says which way a product goes. It is
    enqueued on the device's current torch stream. While a CUDA graph is captured no kernel is loaded: make
    one call of the kind before, else the graph holds torch's kernel. Kernels that split K over a workspace are never
    captured (graphs of one stream may be replayed on two at once): the graph holds torch's kernel then.

    Raises:
        TensorError: tensors on different devices, or ``out`` shares memory with an input.
        DeviceError: the driver refused a launch.
        ToolchainMissing: torch is not installed.
    """
    if _known is not None and not _is_compiling():
        result = _known(a, b, out, pdl)
        if result is not None:
            return result
    return _decided(a, b, out, pdl)


def _decided(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, pdl: bool | None) -> torch.Tensor:
    """:func:`matmul` by the whole decision, which the native table then remembers."""
    try:
        import torch
    except ImportError as error:
        raise _no_torch() from error

    if torch.compiler.is_compiling() or why_torchs(torch, a, b, out):
        return torch.matmul(a, b, out=out)
    check_places(a, b, out)
    if a.device.type != "cuda":
        return torch.matmul(a, b, out=out)
    device, allowed = _device(a.device.index), _pdl_allowed(pdl)
    decision = device.decide(operand(a), operand(b), None if out is None else operand(out), allowed)
    result = None if decision.config is None else device.run(decision, a, b, out)
    _remember(device, decision, (a, b, out, allowed), result)
    return torch.matmul(a, b, out=out) if result is None else result


def explain(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool | None = None) -> str:
    """One line: which kernel :func:`matmul` would use and why, or why it would be torch. Compiles nothing.

    Raises:
        TensorError: as :func:`matmul`.
    """
    try:
        import torch
    except ImportError as error:
        raise _no_torch() from error

    reason = why_torchs(torch, a, b, out)
    if reason:
        return f"torch.matmul: {reason}"
    check_places(a, b, out)
    if a.device.type != "cuda":
        return f"torch.matmul: the tensors are on {a.device}"
    device = _device(a.device.index)
    found = device.decide(operand(a), operand(b), None if out is None else operand(out), _pdl_allowed(pdl))
    if found.config is None or found.problem is None:
        return f"torch.matmul: {found.reason}"
    failed = device.failed.get(kernel_kind(found.problem, found.config))
    if failed:
        return f"torch.matmul: {failed}"
    return f"{config_name(found.config)} for {found.problem.key}: {found.reason}"


def _no_torch() -> ToolchainMissing:
    return ToolchainMissing("torch is not installed", "torch built for CUDA", "pip install 'outblas[gpu]'")


def use_library(library: Library | str | os.PathLike[str] | None, device: int = 0) -> None:
    """Let :func:`matmul` use another library on a CUDA device from now on, e.g. one that ``outblas tune`` wrote.

    Args:
        library: a library or its file; None: the packaged one again.

    Raises:
        RecordError: the file cannot be used. DeviceError: no such GPU, or it is older than sm_80.
        UsageError: the library is of another GPU.
    """
    gpu = gpu_of_device(device)
    if library is None:
        chosen = Library.packaged(gpu.name, missing_ok=True)
    else:
        chosen = library if isinstance(library, Library) else Library.load(library)
    if chosen.rows and chosen.gpu != gpu.name:
        raise UsageError(f"a library of {chosen.gpu} for {gpu.name}", "a library tuned on this GPU", "tune on it")
    with _devices_lock:
        _devices[device] = DeviceState(gpu, chosen, load_kernel)
        if _table is not None:
            _table.forget()


def status() -> dict[str, dict[str, Any]]:
    """Per device used so far (``cuda:0``): its library's rows, kernels loaded, calls bound, seconds spent
    compiling, why kernels failed to load (one line each), and what serves repeated calls: ``native`` (with
    the calls remembered and the kernels launched so, of all devices together), or ``python`` and why."""
    path = f"python: {_no_table}" if _no_table else "python: no product was asked for yet"
    if _table is not None:
        path = "native: {remembered} calls remembered, {launches} launched".format(**_table.counts())
    return {f"cuda:{i}": {**device.status(), "host_path": path} for i, device in sorted(_devices.items())}


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


class DeviceState:
    """What is kept per GPU: the library, decisions, loaded kernels and bound calls.

    Args:
        gpu: None: one that this package does not serve. loader: makes a bindable kernel, with the seconds
            that its compilation took; raises CompileError, ToolchainMissing or DeviceError.
    """

    def __init__(
        self, gpu: Gpu | None, library: Library, loader: Callable[[Problem, KernelConfig], tuple[Any, float]]
    ) -> None:
        self.gpu, self.library, self._loader = gpu, library, loader
        self.failed: dict[tuple[Any, ...], str] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._decisions: OrderedDict[Any, Decision] = OrderedDict()
        self._calls: OrderedDict[Any, Any] = OrderedDict()
        self._compile_seconds = 0.0
        self._workspaces = StreamWorkspaces()
        # A bound call carries its stream from the caller to the driver, so two threads must not share it.
        self._lock = threading.Lock()
        self._threads = threading.local()

    def decide(self, a: Operand, b: Operand, out: Operand | None, pdl: bool) -> Decision:
        """:func:`decide`, remembered."""
        key = (a, b, out, pdl)
        with self._lock:
            found = self._decisions.get(key)
            if found is None:
                found = decide(a, b, out, gpu=self.gpu, library=self.library, pdl=pdl)
                _keep(self._decisions, key, found, KEPT_DECISIONS)
            else:
                self._decisions.move_to_end(key)
            return found

    def run(
        self, decision: Decision, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Enqueue the product on the current stream; None where the kernel cannot be had."""
        import torch

        problem, config = decision.problem, decision.config
        assert problem is not None and config is not None
        index = a.device.index
        here = contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)
        with here:
            self._ensure_context()
            if not self.ready(problem, config, torch.cuda.is_current_stream_capturing):
                return None
            if workspace_bytes(problem, config) and torch.cuda.is_current_stream_capturing():
                return None
            c = out if out is not None else torch.empty((problem.m, problem.n), dtype=a.dtype, device=a.device)
            self.launch(problem, config, a, b, c, torch._C._cuda_getCurrentRawStream(index))
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)  # written behind autograd's back
        return c

    def ready(self, problem: Problem, config: KernelConfig, capturing: Callable[[], bool] = lambda: False) -> bool:
        """Whether the kernel is loaded, after loading it if need be and no graph is being captured."""
        kind = kernel_kind(problem, config)
        if kind in self._kernels:
            return True
        with self._lock:
            if kind in self.failed or (kind not in self._kernels and capturing()):
                return False
            if kind not in self._kernels:
                self._load(kind, problem, config)
            return kind in self._kernels

    def launch(self, problem: Problem, config: KernelConfig, a: Any, b: Any, c: Any, stream: int) -> None:
        """Enqueue ``c = a @ b`` by a kernel that is ready, on a raw stream."""
        need = workspace_bytes(problem, config)
        # All that a bound call depends on; a workspace is its stream's.
        key = (problem, config, a.data_ptr(), b.data_ptr(), c.data_ptr(), stream if need else None)
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                stored = b.t() if problem.layout == "TN" else b
                own = {"workspace": self._workspaces.take(stream, need, a.device)} if need else {}
                call = self._kernels[kernel_kind(problem, config)].bind(problem, a, stored, c, **own)
                # Kept by address, it must not keep the memory: torch could then never use it again.
                call.release()
                _keep(self._calls, key, call, KEPT_CALLS)
            else:
                self._calls.move_to_end(key)
            call(stream)

    def prepared(self, decision: Decision, c: Any) -> Any:
        """The launch of a decision, for outputs like ``c``: see :class:`outblas.launch.Prepared`."""
        assert decision.problem is not None and decision.config is not None
        kernel = self._kernels[kernel_kind(decision.problem, decision.config)]
        return kernel.prepared(decision.problem, c)

    def unavailable(self, decision: Decision) -> bool:
        """Whether the decision is torch's for good: by the library, or because its kernel cannot be had."""
        if decision.problem is None or decision.config is None:
            return True
        return kernel_kind(decision.problem, decision.config) in self.failed

    def status(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu.name if self.gpu else "not supported",
            "library_rows": len(self.library.rows),
            "kernels_loaded": len(self._kernels),
            "calls_bound": len(self._calls),
            "compile_seconds": round(self._compile_seconds, 3),
            "failures": sorted(set(self.failed.values())),
        }

    def _load(self, kind: tuple[Any, ...], problem: Problem, config: KernelConfig) -> None:
        try:
            self._kernels[kind], seconds = self._loader(problem, config)
            self._compile_seconds += seconds
        except (CompileError, ToolchainMissing, DeviceError) as error:
            self.failed[kind] = f"{config_name(config)} cannot be loaded: {error}"
            warnings.warn(f"outblas uses torch.matmul: {self.failed[kind]}", RuntimeWarning, stacklevel=5)

    def _ensure_context(self) -> None:
        """A thread's first driver call needs a context; torch makes one only when it must."""
        if not getattr(self._threads, "ready", False):
            from outblas.launch import ensure_context

            ensure_context()
            self._threads.ready = True


def load_kernel(problem: Problem, config: KernelConfig) -> tuple[Any, float]:
    """(loaded kernel, seconds of compilation: 0 where the cache had it), for the current CUDA device.

    Raises:
        CompileError: it does not compile, or what came out spills or accumulates otherwise.
        ToolchainMissing, DeviceError: no compiler; the driver cannot load it.
    """
    from outblas.compile import compile_source
    from outblas.launch import load
    from outblas.sass import check_static
    from outblas.source import make_source

    start = time.perf_counter()
    source = make_source(problem, config)
    cubin = compile_source(source)
    rejected = check_static(cubin.facts, source, cubin)
    if rejected:
        raise CompileError(
            rejected, "code as it was when it was tuned", "use the toolchain of the library's provenance"
        )
    seconds = 0.0 if cubin.from_cache else time.perf_counter() - start
    _LOG.info("%s %s", config_name(config), f"compiled in {seconds:.2f} s" if seconds else "taken from the cache")
    return load(cubin, config), seconds


_devices: dict[int, DeviceState] = {}
_devices_lock = threading.Lock()
#: The native table, opened by the first CUDA product; None: not yet, or not to be had, for the reason.
_table: Any = None
_no_table = ""
#: What :func:`matmul` asks first: the table's own, and torch's word whether it traces (which never sees the table).
_known: Callable[..., Any] | None = None
_is_compiling: Callable[[], bool] = bool


def _remember(device: DeviceState, decision: Decision, call: tuple[Any, ...], result: Any) -> None:
    """Let the native table answer such calls from now on; ``result`` is the kernel's output, None: torch's product."""
    if result is None and not device.unavailable(decision):
        return  # a kernel that could not be loaded yet, or not be used, under capture
    if decision.problem and decision.config and workspace_bytes(decision.problem, decision.config):
        return  # the table's launches have no stream, a workspace is its stream's
    a, b, out, allowed = call
    with _devices_lock:
        _open_table()
        # Nothing of a device whose library has been replaced meanwhile.
        if _table is not None and _devices.get(a.device.index) is device:
            launch = None if result is None else device.prepared(decision, result)
            _table.learn(a, b, out, allowed, a.element_size(), launch)


def _open_table() -> None:
    """Once; whoever calls holds the lock."""
    global _table, _no_table, _known, _is_compiling
    if _table is not None or _no_table:
        return
    import torch

    _table, _no_table = open_table()
    if _table is not None:
        _is_compiling, _known = torch.compiler.is_compiling, _table.matmul


def _device(index: int) -> DeviceState:
    found = _devices.get(index)
    if found is None:
        with _devices_lock:
            found = _devices.get(index) or _new_device(index)
            _devices[index] = found
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
        library = Library(gpu.name, ())
    return DeviceState(gpu, library, load_kernel)


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    kept[key] = value
    if len(kept) > limit:
        kept.popitem(last=False)


def _pdl_allowed(pdl: bool | None) -> bool:
    return os.environ.get("OUTBLAS_PDL", "").lower() in ("1", "true", "yes", "on") if pdl is None else pdl
