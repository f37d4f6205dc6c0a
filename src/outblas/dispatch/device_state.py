"""State of one GPU: loaded kernels, algorithms of cuBLASLt and bound calls, and the code that runs them."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from outblas.core.config import KernelConfig, KernelKind, Launch, config_name, kernel_kind
from outblas.core.errors import CompileError, DeviceError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.decide import CallTerms, ChooseOrRow, Decision, Operand, by_weight, decide, problem_of_layer
from outblas.dispatch.device_workspaces import DeviceWorkspaces
from outblas.dispatch.exclusion import exclusions_of_environment
from outblas.dispatch.guarantees.guarantee import Guarantee
from outblas.dispatch.process_workload import process_workload
from outblas.kernels.epilogue import STACKED_GATE, why_not_fused
from outblas.kernels.geometry import workspace_bytes
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.recent_entries import keep, touch
from outblas.runtime.workspace import CapturedWorkspace

if TYPE_CHECKING:
    import torch


#: Decisions and bound calls kept per device; the least recently used go first.
KEPT_DECISIONS, KEPT_CALLS = 4096, 4096
_LOG = logging.getLogger(__name__)
#: What a decision is remembered by: A, B, C, launch, guarantee, workload, kernels left out under it, whether by class.
_Asked = tuple[Operand, Operand, Operand | None, Launch, Guarantee, str, int, bool]


class DeviceState:
    """State of one GPU: the library, decisions, loaded kernels, algorithms of cuBLASLt and bound calls.

    Args:
        gpu: the GPU; None: one that this package does not serve.
        loader: returns a bindable kernel and the seconds of its compilation; raises CompileError, ToolchainMissing or
            DeviceError.
        lt: finds algorithms; None: cuBLASLt.
        any_shape: as for :func:`outblas.dispatch.decide.decide`.
        absent: a missing wheel in one line, without which torch computes every product; empty: none is missing.

    Attributes:
        exclude: products and kernels that do not run here, as the environment says when the device is opened.
    """

    def __init__(
        self,
        gpu: Gpu | None,
        library: Library,
        loader: Callable[[Problem, KernelConfig], tuple[Any, float]],
        lt: LtAlgorithms | None = None,
        any_shape: ChooseOrRow | None = None,
        absent: str = "",
    ) -> None:
        self.gpu, self.library, self._loader, self.lt = gpu, library, loader, LtAlgorithms() if lt is None else lt
        self.any_shape, self.absent, self.exclude = any_shape, absent, exclusions_of_environment()
        self.failed: dict[KernelKind, str] = {}
        self._kernels: dict[KernelKind, Any] = {}
        self._decisions: OrderedDict[_Asked, Decision] = OrderedDict()
        self._gates: OrderedDict[tuple[Operand, Operand], Decision] = OrderedDict()
        self._calls: OrderedDict[Any, Any] = OrderedDict()
        self._compile_seconds = 0.0
        self.workspaces = DeviceWorkspaces()
        # Held over Python code, amid which a signal's handler of this thread may multiply, too.
        self._lock = threading.RLock()
        self._threads = threading.local()

    @property
    def has_library(self) -> bool:
        """True if a library names kernels for the GPU, and they can be launched. A chooser alone does not count."""
        return self.gpu is not None and not self.library.is_empty and not self.absent

    def decide(
        self, a: Operand, b: Operand, out: Operand | None, launch: Launch, guarantee: Guarantee = "none",
        by_class: bool = False,
    ) -> Decision:  # fmt: skip
        """Return :func:`outblas.dispatch.decide.decide` for this GPU and library, whose answers are cached.

        ``by_class``: shapes of no library are chosen by :class:`outblas.dispatch.unlisted_shapes.ClassChooser`.
        """
        if self.absent:
            return Decision(None, None, self.absent)
        left_out = len(self.library.fixed_order.left_out) if guarantee == "batch_invariant" else 0
        key = (a, b, out, launch, guarantee, workload := process_workload(), left_out, by_class)
        any_shape = getattr(self.any_shape, "by_class", self.any_shape) if by_class else self.any_shape
        with self._lock:
            if (found := self._decisions.get(key)) is not None:
                touch(self._decisions, key)
                return found
        # Outside of the lock: for a shape of no library it takes milliseconds, in which other threads go on.
        terms, gpu, library = CallTerms(guarantee, workload, self.exclude), self.gpu, self.library
        found = decide(a, b, out, gpu=gpu, library=library, launch=launch, any_shape=any_shape, terms=terms)
        with self._lock:
            if not found.provisional:
                keep(self._decisions, key, found, KEPT_DECISIONS)
        level = logging.DEBUG if found.provisional else logging.INFO
        _LOG.log(level, "%s by %s in %s: %s", a.shape, b.shape, a.dtype, found)
        return found

    def gate(self, a: Operand, b: Operand) -> Decision:
        """Return the kernel that was measured with a stacked gate, for a layer's product. Answers are kept.

        Without one there is no kernel. None is guessed, because a product and a pass may be faster.
        """
        if (found := self._gates.get((a, b))) is not None:
            return found
        problem = problem_of_layer(a, b)
        choice = None if problem is None or self.absent else self.library.gate(problem)
        why = "no gated kernel is known to be faster than a matmul and a separate gate"
        if choice is not None and problem is not None and self.gpu is not None:
            wrong = self.exclude.why_not(problem, choice.config) or why_illegal(problem, choice.config, self.gpu)
            wrong = wrong or why_not_fused(problem, choice.config, STACKED_GATE)
            why = wrong or f"with its gate measured at {choice.speedup:.3f} times a pass more"
            choice = None if wrong else choice
        found = Decision(None if choice is None else choice.config, problem, why)
        with self._lock:
            keep(self._gates, (a, b), found, KEPT_DECISIONS)
        _LOG.info("%s by %s in %s, with its gate: %s", a.shape, b.shape, a.dtype, found)
        return found

    def run(
        self, decision: Decision, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Enqueue the product of a decision on torch's current stream.

        Args:
            a: (M, K).
            b: (K, N).
            out: (M, N), the output; None: a new tensor.

        Returns:
            The output; None if the kernel, algorithm or workspace is not available.
        """
        import torch

        problem, config, capturing = decision.problem, decision.config, torch.cuda.is_current_stream_capturing
        assert problem is not None
        index = a.device.index
        with self.make_current(index):
            if config is None:
                ready = self.algorithm_ready(problem, decision.algorithm, capturing)
            else:
                ready = self.kernel_ready(problem, config, capturing)
            if not ready:
                return None
            stream, need = torch._C._cuda_getCurrentRawStream(index), self.workspace_bytes(decision)
            space = self.workspaces.take(stream, need, a.device, capturing, config is None) if need else None
            if need and space is None:
                return None
            c = out if out is not None else torch.empty((problem.m, problem.n), dtype=a.dtype, device=a.device)
            if config is not None:
                self.launch(problem, config, a, b, c, stream, space)
            elif not self.call_algorithm(problem, decision.algorithm, a, b, c, stream, space):
                return None
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)  # written behind autograd's back
        return c

    def kernel_ready(
        self, problem: Problem, config: KernelConfig, capturing: Callable[[], bool] = lambda: False
    ) -> bool:
        """Load the kernel unless a CUDA graph is being captured; return whether it is available."""
        kind = kernel_kind(problem, config)
        if kind in self._kernels:
            return True
        with self._lock:
            if kind in self.failed or (kind not in self._kernels and capturing()):
                return False
            if kind not in self._kernels:
                self._load(kind, problem, config)
            return kind in self._kernels

    def shared_kernel(self, problem: Problem, config: KernelConfig, load: Callable[[], Any]) -> Any:
        """Return the loaded kernel. If it is missing, the caller's function loads it, for all later calls, too."""
        kind = kernel_kind(problem, config)
        return self._kernels.get(kind) or self._kernels.setdefault(kind, load())

    def forget_decisions(self) -> None:
        with self._lock:
            self._decisions.clear()

    def algorithm_ready(self, problem: Problem, algorithm: str, capturing: Callable[[], bool] = lambda: False) -> bool:
        """Find an algorithm of cuBLASLt; return whether it is available, as :meth:`kernel_ready`.

        An algorithm that never ran counts as not loaded, so it is not available while a graph is being captured.
        """
        known = self.lt.get(problem, algorithm)
        if (known is None or not known.ran) and capturing():
            return False
        return self.lt.find(problem, algorithm) is not None

    def call_algorithm(
        self,
        problem: Problem,
        algorithm: str,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        stream: int,
        space: torch.Tensor | CapturedWorkspace | None = None,
    ) -> bool:
        """Enqueue ``c = a @ b`` on a raw stream by an algorithm that was found before.

        Returns:
            False if the algorithm is unknown or was refused before, or if cuBLASLt refuses its first call. It is then
            not used again.

        Raises:
            DeviceError: cuBLASLt refuses a later call.
        """
        known = self.lt.get(problem, algorithm)
        if known is None:
            return False
        try:
            known(a, b, c, stream, space)
        except DeviceError as error:
            if known.ran:
                raise
            self.lt.fail(problem, algorithm, error.wrong)
            return False
        return True

    def launch(
        self,
        problem: Problem,
        config: KernelConfig,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        stream: int,
        space: torch.Tensor | CapturedWorkspace | None = None,
    ) -> None:
        """Enqueue ``c = a @ b`` by a kernel that is ready, on a raw stream, with the workspace that it may need."""
        # All that a bound call depends on; a workspace is its stream's.
        key = (problem, config, a.data_ptr(), b.data_ptr(), c.data_ptr(), None if space is None else stream)
        once = isinstance(space, CapturedWorkspace)  # good for one capture, which has the call in its graph
        with self._lock:
            call = None if once else self._calls.get(key)
            if call is None:
                stored = b.t() if problem.layout == "TN" else b
                own = {} if space is None else {"workspace": space}
                call = self._kernels[kernel_kind(problem, config)].bind(problem, a, stored, c, **own)
                # Kept by address, it must not keep the memory: torch could then never use it again.
                call.release()
                if not once:
                    keep(self._calls, key, call, KEPT_CALLS)
            else:
                touch(self._calls, key)
            call(stream)

    def prepared(self, decision: Decision, c: torch.Tensor) -> tuple[Any, Any]:
        """Return the form in which the native table repeats a decision, for outputs like ``c``.

        Returns:
            (:class:`outblas.runtime.launch.PreparedLaunch`, None) for a kernel, or
            (None, :class:`outblas.runtime.cublaslt.PreparedAlgorithm`) for an algorithm.
        """
        assert decision.problem is not None
        if decision.config is None:
            known = self.lt.get(decision.problem, decision.algorithm)
            return None, None if known is None else known.prepared(c)
        return self._kernels[kernel_kind(decision.problem, decision.config)].prepared(decision.problem, c), None

    def workspace_bytes(self, decision: Decision) -> int:
        """Return the bytes of the stream's workspace that a decision needs; 0 if it needs none."""
        if decision.problem is None:
            return 0
        if decision.config is not None:
            return workspace_bytes(decision.problem, decision.config)
        known = self.lt.get(decision.problem, decision.algorithm)
        return 0 if known is None else known.workspace_bytes

    def is_left_to_torch(self, decision: Decision) -> bool:
        """Return True if torch computes such products permanently: by the library, or because of an earlier failure."""
        return not decision.provisional if decision.problem is None else bool(self._failure(decision))

    def why_not(self, decision: Decision, index: int) -> str:
        """Return why a decision's kernel or algorithm is not available on a CUDA device; empty if unknown."""
        import torch

        if decision.problem is not None and decision.config is None:
            with self.make_current(index):
                if not torch.cuda.is_current_stream_capturing():
                    self.lt.find(decision.problem, decision.algorithm)
        return self._failure(decision)

    def _failure(self, decision: Decision) -> str:
        assert decision.problem is not None
        if decision.config is None:
            return self.lt.failed.get((decision.problem, decision.algorithm), "")
        return self.failed.get(kernel_kind(decision.problem, decision.config), "")

    def weights(self) -> dict[str, dict[str, list[int]]]:
        """Return :func:`outblas.dispatch.decide.by_weight` of the decisions that are kept, those with a gate too."""
        with self._lock:
            kept, gates = list(self._decisions.items()), list(self._gates.items())
        made = [(key[0], key[1], self._maker(decision)) for key, decision in kept]
        return by_weight([*made, *((*key, "outblas") for key, decision in gates if decision.config is not None)])

    def _maker(self, decision: Decision) -> str:
        named = "cublaslt" if decision.config is None else "outblas"
        return "torch" if self.is_left_to_torch(decision) else named

    def status(self) -> dict[str, Any]:
        choices = getattr(getattr(self.any_shape, "by_class", None), "failed", "")
        return {
            "gpu": self.gpu.name if self.gpu else "not supported",
            "library_rows": len(self.library.rows),
            "library_intervals": len(self.library.intervals),
            "library_gates": len(self.library.gates),
            "kernels_loaded": len(self._kernels),
            "kernels_shipped": sum(bool(getattr(k, "packaged", False)) for k in list(self._kernels.values())),
            "algorithms_found": self.lt.count,
            "calls_bound": len(self._calls),
            "compile_seconds": round(self._compile_seconds, 3),
            "weights": self.weights(),
            "failures": sorted({self.absent, choices, *self.failed.values(), *self.lt.failed.values()} - {""}),
        }

    def _load(self, kind: KernelKind, problem: Problem, config: KernelConfig) -> None:
        try:
            kernel, seconds = self._loader(problem, config)
            self._kernels.setdefault(kind, kernel)
            self._compile_seconds += seconds
        except (CompileError, ToolchainMissing, DeviceError) as error:
            self.failed[kind] = f"{config_name(config)} cannot be loaded: {error}"
            warnings.warn(f"outblas uses torch.matmul: {self.failed[kind]}", RuntimeWarning, stacklevel=5)

    @contextlib.contextmanager
    def make_current(self, index: int) -> Iterator[None]:
        """Make a CUDA device current, with its context, while the context manager lasts. It yields None."""
        import torch

        with contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
            self._ensure_context()
            yield

    def _ensure_context(self) -> None:
        """Make what a thread's first product needs, and what torch would have made for the thread's later ones.

        A driver call needs a context; torch makes one only when it must. A product of torch needs a handle of cuBLAS,
        which cannot be made while a graph is captured. Without this package a product before the capture makes it.
        """
        if getattr(self._threads, "ready", False):
            return
        import torch

        from outblas.runtime.launch import ensure_context

        ensure_context()
        if not torch.cuda.is_current_stream_capturing():
            try:
                torch.cuda.current_blas_handle()
            except RuntimeError as error:  # torch raises it again at a product of its own; this one needs no handle
                _LOG.debug("torch has no cuBLAS handle: %s", str(error).partition("\n")[0])
            self._threads.ready = True
