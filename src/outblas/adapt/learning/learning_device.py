"""A GPU as learning sees it: its slices, its contenders, and the place where winners go."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from outblas.adapt.learning.gpu_workbench import GpuWorkbench
from outblas.adapt.learning.learn_product import BRIEF, Effort, ProductCost, settling_effort
from outblas.adapt.learning.learned_products import Contender
from outblas.adapt.learning.ready_contenders import WHILE_RUNNING, WHILE_SETTLING, at_most, find_ready
from outblas.adapt.learning.slice_limits import MAX_PRODUCT_SECONDS, RUNNING, SETTLING, SliceLimits
from outblas.core.config import Launch
from outblas.core.errors import DeviceError, OutblasError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch import device_registry
from outblas.dispatch.decide import Choose
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.unlisted_shapes import offered_kernels
from outblas.judge.stream_clock import StreamClock
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance, utc_now
from outblas.records.user_library import install, user_library_path
from outblas.runtime.driver import check, driver, new_stream, use_primary_context
from outblas.runtime.launch import load

#: Learning leaves the program this many times its own scratch memory.
_FREE_FACTOR = 2
#: A small product of torch and a layer's. Their loading is not charged to the first product that is learned. CUDA loads
#: a kernel at its first launch, and large operands have other kernels than small ones.
WARM_UP = (Problem(24, 136, 264), Problem(17, 4096, 4096))


class SliceTimer:
    """GPU time of a slice, known after it has ended.

    Attributes:
        us: microseconds from the slice's first work to its end, pauses between its launches included.
    """

    us = 0.0


class Opened(NamedTuple):
    """A product that is ready to be learned.

    Attributes:
        contenders: the ways to compute it, at least one.
        unmeasured: what runs without learning; None: torch.
    """

    bench: GpuWorkbench
    contenders: list[Contender]
    unmeasured: Contender | None
    effort: Effort = BRIEF


class LearningDevice:
    """A CUDA device on which products are learned. All methods but the first two belong to the learning thread."""

    def __init__(self, index: int, own: Choose | None, gpu: Gpu) -> None:
        self._index, self._own, self._gpu = index, own, gpu
        self._clock: LearningClock | None = None
        self._about: dict[str, Any] = {}
        self._is_warm = False

    def why_not(self, problem: Problem) -> str:
        """Return why a product can never be learned here; empty if it can."""
        if SETTLING.scratch_sets(problem, self._gpu):
            return ""
        return f"its operands do not fit into {SETTLING.scratch_bytes // 10**6} MB of scratch memory"

    def fits_slice(self, problem: Problem) -> bool:
        """Return True if a slice can hold the product while the program runs."""
        return RUNNING.holds(problem, self._gpu) and RUNNING.scratch_sets(problem, self._gpu) > 0

    @contextlib.contextmanager
    def slice(self, timed: bool = True) -> Iterator[SliceTimer]:
        """Run a slice on the learning thread's stream.

        Args:
            timed: measure its GPU time, and wait at its end for that stream alone. False for work of the host, whose
                time must not count as the GPU's.

        Raises:
            DeviceError: the GPU cannot be used any more.
        """
        import torch

        timer = SliceTimer()
        with torch.cuda.device(self._index), _unseen_by_captures(), torch.no_grad():
            stream = self._own_clock().torch_stream
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                first.record()
                try:
                    yield timer
                finally:
                    if timed:
                        last.record()
                        last.synchronize()
                        timer.us = 1e3 * first.elapsed_time(last)

    def warm(self) -> None:
        """Load what every product's slices run, list the kernels on offer for plain calls, and ask for the provenance.
        Do it once.

        Raises:
            DeviceError: too little memory is free.
        """
        if self._is_warm:
            return
        self._limits(RUNNING, WARM_UP[-1])
        state, clock = self._state(), self._own_clock()
        clock.limit(RUNNING.tries, RUNNING.plug_us)
        for problem in WARM_UP:
            bench = GpuWorkbench(problem, self._gpu, {}, state.lt, clock, RUNNING, f"cuda:{self._index}")
            try:
                bench.warm()
            finally:
                bench.close()
        with contextlib.suppress(OutblasError):  # no data for this GPU: contenders are found without them
            offered_kernels(self._gpu.name, state.library, "TN", "fp16", "plain")
        self._provenance()
        self._is_warm = True

    def open(self, problem: Problem, launch: Launch, limits: SliceLimits) -> Generator[None, None, Opened | None]:
        """Find contenders, make a bench for them, and yield after each slice; return the product, None if nothing is
        ready.

        Args:
            limits: of a slice: ``RUNNING``, or those of ``settle()``.

        Raises:
            DeviceError: too little memory is free.
        """
        state = self._state()
        effort, most = (BRIEF, WHILE_RUNNING) if limits is RUNNING else self._settling(problem)
        lt, exclude = state.lt, state.exclude
        ready = yield from find_ready(problem, launch, self._gpu, state.library, lt, self._own, exclude, most)
        if not ready.contenders:
            return None
        kernels = {}
        for config, cubin in ready.cubins.items():
            kernels[config] = state.shared_kernel(problem, config, partial(load, cubin, config))
            yield
        limits = self._limits(limits, problem)
        if not self._is_warm:
            self.warm()
            yield
        clock = self._own_clock()
        clock.limit(limits.tries, limits.plug_us)
        bench = GpuWorkbench(problem, self._gpu, kernels, state.lt, clock, limits, f"cuda:{self._index}")
        try:
            yield
            for contender in ready.contenders:  # here, as the host's time does not count as the GPU's yet
                bench.load(contender)
                yield
        except BaseException:  # the end of this generator, too
            bench.close()
            raise
        return Opened(bench, ready.contenders, ready.unmeasured, effort)

    def save(self, row: LibraryRow) -> str:
        """Save a winner's row in the user's library; return where, in words.

        Raises:
            RecordError: the file cannot be written. The row holds in this process all the same.
        """
        path = user_library_path(self._gpu.name)
        if path is None:
            return "not saved, as OUTBLAS_LIBRARY is empty"
        return f"saved in {install(Library(self._gpu.name, (row,)), self._provenance(), path).path}"

    def forget_decisions(self) -> None:
        """Let calls be decided anew, as a product has a new way."""
        device_registry.forget_decisions(self._index)

    def _settling(self, problem: Problem) -> tuple[Effort, tuple[int, int]]:
        """Return the rounds of a product in ``settle()``, and how many kernels and algorithms it tries.

        All of a few slow ones would not be decided in time.
        """
        us = (SETTLING.round_us(problem, self._gpu), SETTLING.proof_us(problem, self._gpu))
        effort, most = settling_effort(ProductCost(*us, MAX_PRODUCT_SECONDS), sum(WHILE_SETTLING))
        return effort, at_most(most)

    def _provenance(self) -> dict[str, Any]:
        """Return the provenance of a row that is saved now. What stays the same is asked for once: it may take long."""
        self._about = self._about or collect_provenance("outblas.enable(learn=True)", self._index)
        return {**self._about, "date": utc_now()}

    def _state(self) -> DeviceState:
        return device_registry.device_state(self._index)

    def _own_clock(self) -> LearningClock:
        import torch

        if self._clock is None:  # torch's streams come from a pool: the program may capture on the same one
            use_primary_context(self._index)  # a new thread has none before torch's first work there
            self._clock = LearningClock(torch.cuda.ExternalStream(new_stream(), device=self._index))
        return self._clock

    def _limits(self, wanted: SliceLimits, problem: Problem) -> SliceLimits:
        """Return limits whose scratch memory leaves the program enough of what is free.

        Raises:
            DeviceError: the product does not fit into that memory.
        """
        import torch

        free, _ = torch.cuda.mem_get_info(self._index)
        free += torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        limits = replace(wanted, scratch_bytes=min(wanted.scratch_bytes, free // _FREE_FACTOR))
        if limits.scratch_bytes < RUNNING.scratch_bytes or not limits.scratch_sets(problem, self._gpu):
            raise DeviceError(
                f"only {free // 10**6} MB of GPU memory is free",
                f"{_FREE_FACTOR * RUNNING.scratch_bytes // 10**6} MB for learning, or more for a large matmul",
                "free some GPU memory, or call outblas.settle() before the program allocates its memory",
            )
        return limits


@contextlib.contextmanager
def _unseen_by_captures() -> Iterator[None]:
    """Let this thread call CUDA while another one captures a graph in CUDA's global mode, without breaking its capture.

    Source:
        CUDA driver API, cuThreadExchangeStreamCaptureMode, CU_STREAM_CAPTURE_MODE_RELAXED.
    """
    cu = driver()
    exchange = cu.cuThreadExchangeStreamCaptureMode
    before = check("cuThreadExchangeStreamCaptureMode", exchange(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check("cuThreadExchangeStreamCaptureMode", exchange(before))


#: CUresult of an event that has not happened yet.
_NOT_READY = 600


class LearningClock(StreamClock):
    """A :class:`outblas.judge.stream_clock.StreamClock` for a thread beside a program that is busy in Python.

    Use it with its stream as torch's current one: to set that takes longer than the rest of a plug.
    """

    def _plug(self, cycles: int) -> None:
        import torch

        torch.cuda._sleep(cycles)

    def _record(self, event: Any) -> None:
        status = locked_driver().cuEventRecord(ctypes.c_void_p(int(event)), ctypes.c_void_p(self.stream))
        if status:
            wrong = f"cuEventRecord failed with status {status}"
            raise DeviceError(wrong, "CUDA_SUCCESS", "check the preceding kernel launches")

    def _is_pending(self, event: Any) -> bool:
        return bool(locked_driver().cuEventQuery(ctypes.c_void_p(int(event))) == _NOT_READY)


@functools.cache
def locked_driver() -> Any:
    """Return the CUDA driver, whose calls keep the interpreter's lock. Only calls that never wait may use it.

    Raises:
        DeviceError: there is no driver.
    """
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        wrong = f"libcuda.so.1 cannot be loaded ({error})"
        raise DeviceError(wrong, "the NVIDIA driver", "install the driver") from error
