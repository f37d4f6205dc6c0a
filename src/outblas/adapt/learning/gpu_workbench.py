"""Scratch operands of one product on a GPU: contenders are proven on them, and timed against torch.

All work runs on a stream of its own, in the thread that learns. Nothing here waits for the whole device, changes a
setting of torch or draws from its generators: the program's threads use them meanwhile. Nor is anything captured in a
CUDA graph, unless the limits say so. While any stream is captured, a program that waits for its device gets an error.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from outblas.adapt.learning.learned_products import Contender
from outblas.adapt.learning.slice_limits import SHARED_WORKSPACE_BYTES, SliceLimits
from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall
from outblas.core.roofline import Gpu
from outblas.judge.gates import check_cell
from outblas.judge.gpu_clock import GraphEntry
from outblas.judge.operands import Operands
from outblas.judge.proof_inputs import fill_integers
from outblas.judge.reference import SlicedReference
from outblas.judge.stream_clock import HostBehindGpu, StreamClock, instantiate
from outblas.judge.torch_baselines import on_current_stream
from outblas.kernels.geometry import workspace_bytes
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.driver import check, driver
from outblas.runtime.workspace import zeroed

#: Inputs of the proof.
Inputs = Literal["integers", "normal"]
ALL_INPUTS: tuple[Inputs, ...] = ("integers", "normal")
#: Name of torch among the ways to compute a product.
_TORCH = "torch"
#: After this number of rounds that the host spoiled, a round has half the calls, which the host queues sooner.
SPOILED_BEFORE_HALVED = 5


class GpuWorkbench:
    """Scratch operands of one product on a GPU, and a clock.

    Make and use it with the clock's stream as torch's current one.

    Args:
        kernels: the kernels among the contenders, loaded.
        clock: clock of the learning thread's stream.

    Raises:
        DeviceError: the scratch memory cannot be had.
    """

    def __init__(
        self, problem: Problem, gpu: Gpu, kernels: Mapping[KernelConfig, Any], lt: LtAlgorithms, clock: StreamClock,
        limits: SliceLimits, device: str,
    ) -> None:  # fmt: skip
        self._problem, self._gpu, self._kernels, self._lt = problem, gpu, kernels, lt
        self._clock, self._limits = clock, limits
        self._data: Any = Operands(problem, max(1, limits.scratch_sets(problem, gpu)), device)
        self._workspace: Any = zeroed(SHARED_WORKSPACE_BYTES, device)
        self._inputs: Inputs = "normal"
        self._reference: Any = None
        self._sums: list[Any] = []  # of each operand set
        self._calls: dict[str, list[BaselineCall]] = {}
        self._warmed: set[str] = set()
        self._graphs: dict[tuple[str, int], RoundGraph] = {}  # by name and first operand set
        self._turn = 0
        self._repeats = limits.calls(problem, gpu)
        self._spoiled = 0
        self._order = random.Random(0)

    def prepare(self, inputs: Inputs) -> Iterator[None]:
        """Fill the operands and compute the reference; yield after each slice."""
        self._inputs, self._reference = inputs, None
        yield from self._fill()
        a, b, _ = self._data[0]
        reference = SlicedReference(self._problem, a, b, inputs == "integers", self._limits.block_bytes)
        yield from reference.blocks(self._limits.block_flop(self._gpu))
        self._reference = reference

    def warm(self) -> None:
        """Run once what every product's slices run, so that no product pays for the loading of it."""
        for inputs in ALL_INPUTS:
            for _ in self.prepare(inputs):
                pass
            self._check(self._torch_calls()[0])
        with contextlib.suppress(HostBehindGpu):
            self._clock.timed([self._part_of(_TORCH, self._torch_calls(), self._repeats)])
        deque(self.operands_intact(), maxlen=0)

    def load(self, contender: Contender) -> None:
        """Run a contender once, so that CUDA loads its machine code: at its first launch that takes milliseconds.

        Raises:
            DeviceError: it cannot be launched.
        """
        self._bound(contender)[0](self._clock.stream)

    def prove(self, contender: Contender) -> str:
        """Run a contender once on the first operands, between canaries; return why it is wrong, empty if it is right.

        Raises:
            DeviceError: it cannot be launched.
        """
        call = self._bound(contender)[0]
        verdict = self._check(call)
        if verdict.status is Status.MEMORY_VIOLATION:  # the next contender gets whole operands
            self._data.restore()
            deque(self._fill(), maxlen=0)
        return "" if verdict.status is Status.PASSED else verdict.detail

    def time_pair(self, contender: Contender) -> tuple[float, float] | None:
        """Return (microseconds per call of the contender, of torch) of one round in random order.

        A balanced round (:meth:`SliceLimits.is_balanced`) has two halves, each behind a plug of its own. The side that
        runs first in one half runs second in the other. Behind a plug, a GPU near its power limit is faster for a
        while.

        Returns:
            None if the host could not queue the round ahead of the GPU. If that happens often, rounds get shorter.
        """
        calls = {contender.name: self._bound(contender), _TORCH: self._torch_calls()}
        order = list(calls)
        self._order.shuffle(order)
        orders = [order]
        if self._repeats > 1 and self._limits.is_balanced(self._problem, self._gpu):
            orders.append(order[::-1])
        each = self._repeats // len(orders)
        spent_us = dict.fromkeys(calls, 0.0)
        try:
            for half in orders:
                times = self._clock.timed([self._part_of(name, calls[name], each) for name in half])
                for name, us in zip(half, times, strict=True):
                    spent_us[name] += us
        except HostBehindGpu:
            # Count a spoiled round. Now and then halve the calls of a round, whose time goes to the host's queueing.
            self._spoiled += 1
            if self._spoiled % SPOILED_BEFORE_HALVED == 0 and self._repeats > 1:
                self._repeats //= 2
                self._drop_graphs()
                freed = self._limits.work_us * (1 - self._repeats / self._limits.calls(self._problem, self._gpu))
                self._clock.limit(self._limits.tries, self._limits.plug_us + freed)
            return None
        count = len(orders) * each
        return spent_us[contender.name] / count, spent_us[_TORCH] / count

    def operands_intact(self) -> Generator[None, None, bool]:
        """Return True if no call has changed an input or a canary; yield after each slice."""
        import torch

        found = yield from self._in_steps(self._data.sums_of(index) for index in range(self._data.sets))
        return torch.equal(torch.stack(found), torch.stack(self._sums))

    def close(self) -> None:
        """Give the memory back to torch; harmless when done twice."""
        self._drop_graphs()
        self._calls.clear()
        self._data = self._workspace = self._reference = None
        self._sums = []

    def _check(self, call: BaselineCall) -> Verdict:
        whole, _ = self._sums[0]
        return check_cell(self._data, self._reference, whole, partial(call, self._clock.stream))

    def _fill(self) -> Iterator[None]:
        """Fill the operands and sum them up; yield after each slice. All in one takes 0.5 ms."""
        sets = range(self._data.sets)
        # Contenders ran unproven while they were loaded.
        yield from self._in_steps(self._data.restore_guards(index) for index in sets)
        if self._inputs == "integers":
            fill_integers(self._problem, *self._data[0][:2])
            yield
        else:
            yield from self._in_steps(self._data.fill_steps())
        self._sums = yield from self._in_steps(self._data.sums_of(index) for index in sets)

    def _in_steps(self, each: Iterator[Any]) -> Generator[None, None, list[Any]]:
        """Return the items of an iterator, each the work on one operand set; yield after each slice."""
        most, found = self._limits.sets_a_step(self._problem), list[Any]()
        while some := list(itertools.islice(each, most)):
            found += some
            yield
        return found

    def _bound(self, contender: Contender) -> list[BaselineCall]:
        if contender.name not in self._calls:
            sets = (self._data[index] for index in range(self._data.sets))
            self._calls[contender.name] = [self._bind(contender, *operands) for operands in sets]
        return self._calls[contender.name]

    def _bind(self, contender: Contender, a: Any, b: Any, c: Any) -> BaselineCall:
        if contender.config is not None:
            need = workspace_bytes(self._problem, contender.config)
            own = {"workspace": self._workspace} if need else {}
            bound: BaselineCall = self._kernels[contender.config].bind(self._problem, a, b, c, **own)
            return bound
        algorithm = self._lt.find(self._problem, contender.algorithm)
        if algorithm is None:
            wrong = f"cuBLASLt rejects algorithm {contender.algorithm}"
            raise DeviceError(wrong, "an algorithm that it accepts", "tune again")
        workspace = self._workspace
        return lambda stream: algorithm(a, b, c, stream, workspace)

    def _torch_calls(self) -> list[BaselineCall]:
        import torch

        if _TORCH not in self._calls:
            sets = (self._data[index] for index in range(self._data.sets))
            self._calls[_TORCH] = [on_current_stream(torch.mm, self._problem, *operands) for operands in sets]
        return self._calls[_TORCH]

    def _part_of(self, name: str, calls: list[BaselineCall], count: int) -> Callable[[], None]:
        """Return a function that enqueues the next ``count`` calls of one side; parts are asked for in their order.

        Each call has the operand set after that of the call before, whosever that is. With sets of its own, the second
        side would find in the cache what the first has just read. One call runs untimed before the first
        round, so that all is loaded.
        """
        if name not in self._warmed:
            calls[0](self._clock.stream)
            self._warmed.add(name)
        turn, self._turn = self._turn, (self._turn + count) % len(calls)
        chosen = list(itertools.islice(itertools.cycle(calls), turn, turn + count))
        if self._limits.graphs:
            if (name, turn) not in self._graphs:
                self._graphs[name, turn] = RoundGraph(chosen, self._clock.stream)
            return self._graphs[name, turn]

        def enqueue() -> None:
            for call in chosen:
                call(self._clock.stream)

        return enqueue

    def _drop_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()


class RoundGraph(GraphEntry):
    """A graph of calls that run one after the other. Call it to launch them, and ``free`` after use.

    Args:
        calls: the calls; each kind has run before, so that all is loaded.
        stream: raw CUstream on which they are captured, and run.

    Raises:
        DeviceError: the capture fails.
    """

    def __init__(self, calls: Sequence[BaselineCall], stream: int) -> None:
        super().__init__("round", instantiate(calls, stream), calls, len(calls))
        self._stream = stream
        check("cuGraphUpload", driver().cuGraphUpload(self.executable, stream))

    def __call__(self) -> None:
        check("cuGraphLaunch", driver().cuGraphLaunch(self.executable, self._stream))
