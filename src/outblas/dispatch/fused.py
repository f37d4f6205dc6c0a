"""A single kernel for a product and the operations that follow it.

It computes act(A B + bias) + residual, or act(gate) * up of neighbouring columns of A B + bias, and rounds once.

The kernel is the one that the library names for the product, compiled with an epilogue
(:mod:`outblas.kernels.epilogue`). Only gates that the library names are shipped. Others, and those that the driver
refuses, are compiled on a thread of its own after the first call, or by :func:`outblas.warm`. Until it is loaded, and
if no kernel serves, torch's operations run, so no call waits for a compiler.

The library measured the product alone; the speed of the fused kernel is not known. So a fused kernel runs only on
request: :func:`outblas.linear` with an activation or a residual, :func:`outblas.gated_linear`, or a bias alone in the
capture of a CUDA graph (:func:`outblas.dispatch.fused_layer.kernel_adds_bias`). It may do so even if the bare product
is left to cuBLASLt or torch (see :mod:`outblas.dispatch.kernel_choice`).
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outblas.core.background import BackgroundQueue
from outblas.core.config import KernelConfig, Launch, config_name, kernel_kind
from outblas.core.problem import Problem
from outblas.core.roofline import architecture
from outblas.dispatch import device_registry
from outblas.dispatch.background_kernels import BackgroundKernels
from outblas.dispatch.call_option import call_option
from outblas.dispatch.decide import Decision, NotWhileCapturing, Operand, problem_of_layer
from outblas.dispatch.device_state import KEPT_CALLS, KEPT_DECISIONS
from outblas.dispatch.kernel_choice import kernel_despite_fallback, kernel_to_fuse
from outblas.dispatch.product_operands import aligned_operand, operand
from outblas.dispatch.unlisted_shapes import ask_cublaslt
from outblas.kernels.epilogue import Epilogue, why_not_fused
from outblas.kernels.geometry import workspace_bytes
from outblas.kernels.source import make_source
from outblas.runtime.fused_launch import Extra, FusedKernel, row_stride, why_no_gated_output, why_unfit
from outblas.runtime.kernel_loader import ARCHITECTURE, KernelCode, kernel_code, load_code
from outblas.runtime.recent_entries import keep
from outblas.runtime.workspace import CapturedWorkspace

if TYPE_CHECKING:
    import torch

_NOTHING = Decision(None, None, "")
#: The epilogue of a layer with a bias that nothing follows.
BIAS = Epilogue(bias=True)


class FusedState:
    """Fused kernels of one GPU, and bound calls.

    Args:
        build: finds the machine code of a kernel on a thread of its own (:func:`fused_code`).
        load: loads it, on the caller's thread and in its context.

    Attributes:
        kernels: by kind and epilogue.
    """

    def __init__(
        self,
        build: Callable[..., KernelCode] | None = None,
        load: Callable[[KernelCode, KernelConfig, Epilogue], tuple[Any, float]] | None = None,
    ) -> None:
        load_one = load or _load_fused
        self.kernels = BackgroundKernels(
            _compiler.submit, build or fused_code, lambda code, problem, *which: load_one(code, *which), _name_of,
            "uses another kernel or torch", self._predict_again,
        )  # fmt: skip
        self.launched = 0
        self._calls: OrderedDict[Any, Any] = OrderedDict()
        #: Each holds the device's decision, so that its id stays its own.
        self._predicted: OrderedDict[tuple[int, Epilogue], tuple[Decision, Decision | None]] = OrderedDict()
        self._lock = threading.RLock()

    def kernel_ready(
        self, problem: Problem, config: KernelConfig, epilogue: Epilogue, wait: bool = False, capturing: bool = False
    ) -> bool:
        """Return True if the kernel is loaded; otherwise start its compilation and return False.

        With ``wait`` the first call compiles and returns True, unless that fails.

        Args:
            wait: compile within this call instead of in the background.
            capturing: a CUDA graph is being captured: start and load nothing.
        """
        key = (kernel_kind(problem, config), epilogue)
        asked = (problem, config, epilogue)
        return key in self.kernels.loaded or self.kernels.get(key, asked, wait, capturing) is not None

    def has_failed(self, problem: Problem, epilogue: Epilogue, config: KernelConfig) -> bool:
        failed = self.kernels.failed
        return bool(failed) and (kernel_kind(problem, config), epilogue) in failed

    def predicted(
        self, decision: Decision, index: int, a: Operand, b: Operand, epilogue: Epilogue, launch: Launch
    ) -> Decision | None:
        """Return the answer of :func:`_predict`, which is asked once for a decision of the device and an epilogue.

        The device returns one and the same object for equal calls, and new ones after a change of its library.
        """
        key = (id(decision), epilogue)
        known, found = self._predicted.get(key, (None, None))
        if known is not decision:
            try:
                found = _predict(index, a, b, epilogue, launch)
            except NotWhileCapturing:
                return None
            with self._lock:
                keep(self._predicted, key, (decision, found), KEPT_DECISIONS)
        return found

    def _predict_again(self) -> None:
        """Forget predictions: another kernel may take the place of one that failed."""
        with self._lock:
            self._predicted.clear()

    def run(
        self,
        problem: Problem,
        config: KernelConfig,
        epilogue: Epilogue,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extra: Extra,
        stream: int,
        space: torch.Tensor | CapturedWorkspace | None = None,
    ) -> None:
        """Enqueue the kernel; :meth:`kernel_ready` must have returned True.

        Args:
            tensors: A (M, K), B (K, N) and C.
            stream: raw stream, which is the current stream of torch.
        """
        a, b, c = tensors
        once = isinstance(space, CapturedWorkspace)  # good for one capture, which has the call in its graph
        addresses = tuple(None if t is None else t.data_ptr() for t in (*tensors, *extra))
        pitch = None if extra.residual is None else row_stride(extra.residual)
        key = (problem, config, epilogue, addresses, pitch, None if space is None else stream)
        with self._lock:
            call = None if once else self._calls.pop(key, None)
            if call is None:
                stored = b.t() if problem.layout == "TN" else b
                kernel = self.kernels.loaded[kernel_kind(problem, config), epilogue]
                call = kernel.bind(problem, (a, stored, c), extra, space)
                call.release()  # kept by address, it must not keep the memory
            if not once:
                keep(self._calls, key, call, KEPT_CALLS)  # the most recently used comes last
            call(stream)
            self.launched += 1

    def status(self) -> dict[str, Any]:
        """Return counts of fused kernels and the reasons of failures.

        Returns:
            ``kernels_loaded``, ``kernels_shipped`` (of those) and ``being_compiled`` (numbers), ``compile_seconds``,
            ``failures`` (sorted list of reasons), and ``launched``: products so far, launched or put into a graph.
            A new state has only zeros, and no failure.
        """
        return {
            "kernels_loaded": len(self.kernels.loaded),
            "kernels_shipped": sum(bool(getattr(k, "packaged", False)) for k in list(self.kernels.loaded.values())),
            "being_compiled": self.kernels.being_compiled(),
            "compile_seconds": round(self.kernels.compile_seconds, 3),
            "failures": sorted(set(self.kernels.failed.values())),
            "launched": self.launched,
        }


def fused_product(
    a: torch.Tensor,
    b: torch.Tensor,
    extra: Extra,
    epilogue: Epilogue,
    out: torch.Tensor | None = None,
    wait: bool = False,
) -> torch.Tensor | None:
    """Compute ``act(a @ b + bias) + residual`` by a fused kernel on the current stream.

    The operands are plain tensors of one CUDA device without a gradient
    (:func:`outblas.dispatch.product_operands.why_left_to_torch`).

    Args:
        a: (M, K).
        b: (K, N).
        extra: the tensors that ``epilogue`` names.
        out: of the result's shape, contiguous; None: a new tensor.
        wait: wait for the compiler if the kernel is not there yet.

    Returns:
        (M, N), or (M, N/2) of a gated epilogue. None if torch must compute it: the library has no kernel, the kernel
        does not take the operands, or it is not compiled yet.

    Raises:
        DeviceError: the driver refused the launch.
    """
    decision, reason = _decide(a, b, extra, epilogue, out)
    if reason or decision.problem is None or decision.config is None:
        return None
    import torch

    problem, config, state = decision.problem, decision.config, _state(a.device.index)
    device = device_registry.device_state(a.device.index)
    with device.make_current(a.device.index):
        capturing = torch.cuda.is_current_stream_capturing()
        if not state.kernel_ready(problem, config, epilogue, wait, capturing):
            if wait and _decide(a, b, extra, epilogue, out)[0].config not in (None, config):
                return fused_product(a, b, extra, epilogue, out, wait)  # by the kernel in place of a failed one
            return None
        stream, need = _stream(a.device.index), workspace_bytes(problem, config)
        space = None
        if need:
            space = device.workspaces.take(stream, need, a.device, torch.cuda.is_current_stream_capturing)
            if space is None:
                return None
        shape = (problem.m, epilogue.columns(problem.n))
        c = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
        state.run(problem, config, epilogue, (a, b, c), extra, stream, space)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # written behind autograd's back
    return c


def why_not(a: torch.Tensor, b: torch.Tensor, extra: Extra, epilogue: Epilogue, out: torch.Tensor | None = None) -> str:
    """Return why :func:`fused_product` leaves such operands to torch even when compiled; empty if it does not."""
    decision, reason = _decide(a, b, extra, epilogue, out)
    if reason or decision.problem is None or decision.config is None:
        return reason or decision.reason
    return _state(a.device.index).kernels.failed.get((kernel_kind(decision.problem, decision.config), epilogue), "")


def serves(a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue) -> bool:
    """Return True if a fused kernel may compute the product of two matrices and an epilogue without further tensors.

    They may lack an address (fake tensors); aligned operands are assumed.
    """
    decision, reason = _decide(a, b, Extra(), epilogue, None, aligned_operand)
    return not reason and decision.config is not None


def _decide(
    a: torch.Tensor,
    b: torch.Tensor,
    extra: Extra,
    epilogue: Epilogue,
    out: torch.Tensor | None,
    described: Callable[[torch.Tensor], Operand] = operand,
) -> tuple[Decision, str]:
    """The library's decision on the product, and why it cannot be fused (empty: it can)."""
    if a.device.type != device_registry.DEVICE_TYPE:
        return _NOTHING, f"the tensors are on {a.device}"
    if not epilogue.on or not extra.fits(epilogue):
        return _NOTHING, f"nothing to fuse, or not the operands of {epilogue.name}"
    device = device_registry.device_state(a.device.index)
    launch = call_option().launch
    if epilogue.stacked:  # measured beside plain kernels
        return (device.gate(described(a), described(b)) if launch == "plain" else _NOTHING), ""
    plain_out = None if out is None or epilogue.gated else described(out)
    left, right = described(a), described(b)
    decision = device.decide(left, right, plain_out, launch)
    if epilogue.gated and decision.config is None and decision.problem is not None:
        decision = kernel_despite_fallback(decision, device.library.lookup(decision.problem), launch, device.gpu)
    state = _state(a.device.index)
    if decision.config is None or decision.problem is None:
        may_predict = not decision.provisional and not device.absent
    else:
        may_predict = state.has_failed(decision.problem, epilogue, decision.config)
    if may_predict:
        decision = state.predicted(decision, a.device.index, left, right, epilogue, launch) or decision
    if decision.problem is None or decision.config is None:
        return decision, decision.reason or "the library has no kernel for it"
    reason = device.exclude.why_not(decision.problem, decision.config)
    reason = reason or why_not_fused(decision.problem, decision.config, epilogue) or ""
    if not reason and epilogue.gated and out is not None:
        reason = why_no_gated_output(decision.problem, a, out)
    return decision, reason or why_unfit(decision.problem, decision.config, extra, a, out)


def _predict(index: int, a: Operand, b: Operand, epilogue: Epilogue, launch: Launch) -> Decision | None:
    """A kernel for a product that the device leaves to torch, or whose kernel failed, if it is expected to gain.

    It raises NotWhileCapturing if it must wait for the end of a capture.
    """
    device, problem = device_registry.device_state(index), problem_of_layer(a, b)
    if problem is None or device.gpu is None or device.any_shape is None:
        return None
    answers = ask_cublaslt(device.lt, index, problem)
    has_failed = functools.partial(_state(index).has_failed, problem, epilogue)
    answer = answers[0] if answers else ""
    return kernel_to_fuse(problem, epilogue, device.gpu, device.library, launch, answer, has_failed)


def fused_code(
    problem: Problem, config: KernelConfig, epilogue: Epilogue, refused: str = "", arch: str = ARCHITECTURE
) -> KernelCode:
    """Return the machine code of a fused kernel, as :func:`outblas.runtime.kernel_loader.kernel_code`.

    Args:
        refused: why the driver refused the shipped cubin.

    Raises:
        OutblasError: as :func:`outblas.runtime.kernel_loader.kernel_code`.
    """
    else_say = ("machine code as sound as that of the kernel alone", "nothing to do: the product is right")
    name = _name_of(problem, config, epilogue)
    return kernel_code(make_source(problem, config, epilogue), name, arch, refused, else_say)


def _name_of(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> str:
    return f"{config_name(config)} with {epilogue.name}"


def _load_fused(code: KernelCode, config: KernelConfig, epilogue: Epilogue) -> tuple[Any, float]:
    """Return (bindable kernel, seconds of compilation)."""
    return load_code(code, lambda cubin: FusedKernel(cubin, config, epilogue)), code.seconds


def status() -> dict[str, dict[str, Any]]:
    """Return ``cuda:<index>`` -> :meth:`FusedState.status`, for each device used so far; ``{}`` before the first."""
    return {f"cuda:{index}": state.status() for index, state in list(_states.items())}


_states: dict[int, FusedState] = {}
_lock = threading.RLock()
#: One thread: a compiler takes a core, and programs want theirs.
_compiler = BackgroundQueue("outblas-fused")


def _state(index: int) -> FusedState:
    known = _states.get(index)  # without the lock: each call asks
    if known is not None:
        return known
    with _lock:
        found = _states.get(index)
        if found is None:
            gpu = device_registry.device_state(index).gpu
            arch = ARCHITECTURE if gpu is None else architecture(gpu)
            found = _states[index] = FusedState(functools.partial(fused_code, arch=arch))
        return found


def _stream(index: int) -> int:
    import torch

    return int(torch._C._cuda_getCurrentRawStream(index))
