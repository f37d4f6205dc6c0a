"""The only clock of GPU time (outblas_lab.pool.latency measures the latency of requests).

``offline``: GPU time per call. Each entry is a CUDA graph of R back-to-back calls (R <= 32, about 300 us of work) on a
non-blocking stream. Its operands hold N(0, 1) data and rotate over buffers of 200 MB in total, if R allows. In every
round each entry is launched once, in a random order, between two events. A spinning kernel of bounded length first
plugs the stream while the host queues the round. A round counts only if every graph was queued before its entry could
begin. So no figure depends on the host's speed. Calls within one graph may overlap by programmatic dependent launch;
graphs and events do not overlap.

``offline_cold``: the same rounds, but L2 is evicted before every call by reading twice its size. A memset would leave
dirty lines, and the call would pay for their write-back. The eviction cannot be subtracted honestly from a graph's
time, so there is no graph. Each call stands alone between two events on the plugged stream. A round's figure, the
median over its calls, includes the time between two events (2.9 us on an H200), so ratios are conservative.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Timing
from outblas.core.install_hint import needed
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.core.roofline import Gpu, floor_us, operand_sets, repeats
from outblas.judge.operands import GUARD_BYTES, Operands
from outblas.judge.rounds import Prune, RoundOrders, slower_than_the_fastest, time_in_rounds, timing_of_samples
from outblas.judge.stream_clock import StreamClock, instantiate
from outblas.runtime.driver import check, driver

MIN_ROUNDS, QUICK_ROUNDS = 7, 3
#: Ratio to the fastest above which a choice among many gives an entry no further round.
DROP_BEYOND_FASTEST = 1.5
#: Factor of the fastest entry's time within which a cold clock times others again with cold caches.
NEAR_WITH_WARM_CACHES = 1.25
#: Calls of one entry in one cold round.
COLD_CALLS_PER_ROUND = 4


class GraphEntry:
    """A captured entry, as :meth:`GpuClock.capture` makes it: a graph of ``repeats`` calls. Call ``free`` after use.

    Arguments are attributes, too: ``executable`` is the CUgraphExec (None after ``free``), ``calls`` the bound calls.
    """

    def __init__(self, name: str, executable: Any, calls: Sequence[BaselineCall], repeats: int) -> None:
        self.name, self.repeats = name, repeats
        self.executable = executable
        self.calls = calls  # keeps kernels, descriptors and tensor maps alive

    def free(self) -> None:
        """Destroy the graph and set ``executable`` to None; harmless when done twice, or after the context was lost."""
        if self.executable is not None:
            driver().cuGraphExecDestroy(self.executable)  # unchecked: a failure here would hide the first one
            self.executable = None


class GpuClock(StreamClock, contextlib.AbstractContextManager["GpuClock"]):
    """Operands, stream and events of one problem on one GPU; a context manager that yields itself and then closes.

    Attributes: ``problem``; ``gpu_index``; ``repeats``, the calls per graph; ``sets``, the number of operand sets;
    ``data``, the operands; ``torch_stream``; ``stream``, its raw CUstream; ``cold``, as the argument.

    Args:
        seed: seed of the N(0, 1) data.
        guard_bytes: width of the canaries around every operand.
        gpu: GPU whose floor sets ``repeats`` and ``sets``.
        cold: its figures are of cold caches, so rivals choose their algorithm under them.

    Raises:
        DeviceError: no such GPU, or not enough memory.
        ToolchainMissing: torch is not installed.
    """

    def __init__(
        self, problem: Problem, gpu_index: int = 0, seed: int = 0, guard_bytes: int = GUARD_BYTES, *, gpu: Gpu,
        cold: bool = False,
    ) -> None:  # fmt: skip
        torch = _cuda_torch(gpu_index)
        self.problem, self.gpu_index, self.cold = problem, gpu_index, cold
        torch.cuda.set_device(gpu_index)
        estimate = floor_us(problem, gpu)
        self.repeats, self.sets = repeats(estimate), operand_sets(problem, estimate)
        self.data = Operands(problem, self.sets, f"cuda:{gpu_index}", guard_bytes)
        self.data.fill_normal(seed)
        super().__init__(torch.cuda.Stream(gpu_index))  # torch makes its streams non-blocking
        self._evictor: Callable[[], None] | None = None
        torch.cuda.synchronize(gpu_index)

    @property
    def l2_bytes(self) -> int:
        """Size of the GPU's L2, bytes."""
        import torch

        return int(torch.cuda.get_device_properties(self.gpu_index).L2_cache_size)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give events and operands back (``data`` is None then); harmless when done twice."""
        super().close()
        self._evictor = None
        self.data = None  # type: ignore[assignment]

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that makes the clock's stream torch's current one within its ``with`` block."""
        import torch

        return torch.cuda.stream(self.torch_stream)

    def operands(self, index: int) -> tuple[Any, Any, Any]:
        """Return (A, B as stored, C) of operand set ``index``, 0 to ``sets`` - 1: torch tensors, not copies."""
        return self.data[index]

    def bind(self, entry: Bindable) -> list[BaselineCall]:
        """Return one bound call per operand set, in order. The first two have been run once, so that all is loaded."""
        operands = [self.data[i] for i in range(self.sets)]
        many = getattr(entry, "bind_many", None)  # calls of one stream may share what each would have of its own
        calls = many(self.problem, operands) if many else [entry.bind(self.problem, *each) for each in operands]
        for call in calls[: 1 if len(calls) == 1 else 2]:
            call(self.stream)
        return calls

    def capture(self, entry: Bindable) -> GraphEntry:
        """Return a graph of ``repeats`` back-to-back calls that rotate over the operand sets. Free it after use.

        An entry with a method ``change_graph`` is given the CUgraph before it is instantiated.

        Raises:
            DeviceError: the capture fails (the entry synchronises, allocates or leaves its stream).
        """
        calls = self.bind(entry)
        rotated = [calls[i % self.sets] for i in range(self.repeats)]
        executable = instantiate(rotated, self.stream, getattr(entry, "change_graph", None))
        return GraphEntry(entry.name, executable, calls, self.repeats)

    def round(self, entries: Sequence[GraphEntry], order: Sequence[int]) -> list[float]:
        """Time every entry once and return its microseconds per call, in the order of ``entries``.

        ``order`` has every index into ``entries`` once, in the order of launching. Raises DeviceError if a launch fails
        or the host cannot queue ahead of the GPU.
        """
        launch = driver().cuGraphLaunch
        works = [(lambda e=entries[i]: check("cuGraphLaunch", launch(e.executable, self.stream))) for i in order]
        times = self.timed(works)
        out = [0.0] * len(entries)
        for position, index in enumerate(order):
            out[index] = times[position] / entries[index].repeats
        return out

    def cold_round(self, entries: Sequence[Sequence[BaselineCall]], rng: random.Random) -> list[float]:
        """Return per entry the median microseconds of 4 calls, with L2 evicted before each call.

        Each entry is what :meth:`bind` returns. The calls of all entries are shuffled by ``rng``.
        """
        jobs = [(i, j) for i in range(len(entries)) for j in range(COLD_CALLS_PER_ROUND)]
        rng.shuffle(jobs)
        offset = rng.randrange(self.sets)
        works = []
        for i, j in jobs:
            call = entries[i][(offset + j) % self.sets]
            works.append(lambda call=call: call(self.stream))
        times = self.timed(works, before=self.evict)
        found: list[list[float]] = [[] for _ in entries]
        for (i, _), us in zip(jobs, times, strict=True):
            found[i].append(us)
        return [float(np.median(f)) for f in found]

    def quick(
        self, entries: Mapping[str, Bindable], rounds: int = QUICK_ROUNDS, seed: int = 0,
        skip: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> dict[str, Timing]:  # fmt: skip
        """Time by the offline protocol with few rounds, to find the fastest of many entries.

        An entry that raises ``skip`` at its capture is left out of the result. So is one that is over 1.5 x the fastest
        in its first timed round. The result is name -> Timing of ``rounds`` samples; empty without entries.
        """
        with self.captured(entries, skip) as graphs:
            found = self.measure(graphs, rounds, seed, prune=Prune(1, slower_than_the_fastest(DROP_BEYOND_FASTEST)))
            return {name: t for name, t in found.items() if len(t.samples_us) == rounds}

    def quick_choice(
        self, entries: Mapping[str, Bindable], skip: type[BaseException] | tuple[type[BaseException], ...] = ()
    ) -> dict[str, Timing]:
        """Time entries as :meth:`quick`, to choose the fastest. A cold clock then times the near ones with cold caches.

        Near are those within 1.25 x the fastest. They get 7 rounds with L2 evicted before every call. Only they are in
        the result of a cold clock, unless none of them can be bound again.
        """
        warm = self.quick(entries, skip=skip)
        if not self.cold or len(warm) < 2:
            return warm
        limit = NEAR_WITH_WARM_CACHES * min(timing.median_us for timing in warm.values())
        calls: dict[str, list[BaselineCall]] = {}
        for name in (name for name, timing in warm.items() if timing.median_us <= limit):
            with contextlib.suppress(*_classes(skip)):
                calls[name] = self.bind(entries[name])
        return (self.measure_cold(calls) if calls else {}) or warm

    @contextlib.contextmanager
    def captured(
        self, entries: Mapping[str, Bindable], skip: type[BaseException] | tuple[type[BaseException], ...] = ()
    ) -> Iterator[dict[str, GraphEntry]]:
        """Return a context manager that yields name -> captured entry and frees all of them at its end.

        An entry whose capture raises ``skip`` is left out.

        Raises:
            DeviceError: a capture fails, as for :meth:`capture`.
        """
        graphs: dict[str, GraphEntry] = {}
        try:
            for name, entry in entries.items():
                with contextlib.suppress(*_classes(skip)):
                    graphs[name] = self.capture(entry)
            yield graphs
        finally:
            for graph in graphs.values():
                graph.free()

    def measure(
        self, graphs: Mapping[str, GraphEntry], rounds: int = MIN_ROUNDS, seed: int = 0,
        warmup_seconds: float = 0.0, benchmark_seconds: float = 0.0, prune: Prune | None = None,
    ) -> dict[str, Timing]:  # fmt: skip
        """Time captured entries in interleaved rounds.

        Args:
            rounds: timed rounds, at least; more until ``benchmark_seconds`` have passed, but none beyond 2000.
            warmup_seconds: seconds of untimed rounds before; at least one round.
            benchmark_seconds: seconds of timed rounds, at least.
            prune: drops entries after some rounds; None: all stay.

        Returns:
            Name -> Timing of mode ``offline``, one sample per round in microseconds; a dropped entry has fewer.
        """
        orders = RoundOrders(self._seed_of_orders(seed))

        def one(names: Sequence[str]) -> dict[str, float]:
            times = self.round([graphs[name] for name in names], orders.next(len(names)))
            return dict(zip(names, times, strict=True))

        if not graphs:
            return {}
        samples = time_in_rounds(one, list(graphs), rounds, warmup_seconds, benchmark_seconds, prune)
        return {n: timing_of_samples("offline", taken, self.repeats, self.sets) for n, taken in samples.items()}

    def measure_cold(
        self, calls: Mapping[str, Sequence[BaselineCall]], rounds: int = MIN_ROUNDS, seed: int = 0,
        warmup_seconds: float = 0.0, benchmark_seconds: float = 0.0, prune: Prune | None = None,
    ) -> dict[str, Timing]:  # fmt: skip
        """Time as :meth:`measure`, with L2 evicted before every call; the mode is ``offline_cold``, ``repeats`` is 1.

        ``calls`` is name -> what :meth:`bind` returns. The other arguments are those of :meth:`measure`.
        """
        rng = random.Random(self._seed_of_orders(seed))

        def one(names: Sequence[str]) -> dict[str, float]:
            return dict(zip(names, self.cold_round([calls[name] for name in names], rng), strict=True))

        samples = time_in_rounds(one, list(calls), rounds, warmup_seconds, benchmark_seconds, prune)
        return {n: timing_of_samples("offline_cold", taken, 1, self.sets) for n, taken in samples.items()}

    def _seed_of_orders(self, seed: int) -> str:
        """Return the seed of this problem's orders. If all problems shared them, so would an error by place."""
        return f"{seed}/{self.problem.key}"

    def evict(self) -> None:
        """Read twice the L2's size on the stream; whatever else L2 held is gone then. Does not wait."""
        import torch

        if self._evictor is None:
            size = 2 * self.l2_bytes
            # One block per row: the reduction needs no scratch memory.
            buffer = torch.zeros((4096, size // 4 // 4096), dtype=torch.float32, device=f"cuda:{self.gpu_index}")
            sink = torch.empty(4096, dtype=torch.float32, device=buffer.device)
            torch.cuda.synchronize(self.gpu_index)
            stream = self.torch_stream

            def evict() -> None:
                with torch.cuda.stream(stream):
                    torch.sum(buffer, dim=1, out=sink)

            self._evictor = evict
        self._evictor()


def choose_algorithm(entry: Bindable, bench: GpuClock) -> None:
    """Call ``entry.prepare(bench)`` if the entry has it, as ``lt_auto`` does; else do nothing. Return None."""
    chooser = getattr(entry, "prepare", None)
    if chooser is not None:
        chooser(bench)


def _classes(skip: Any) -> tuple[type[BaseException], ...]:
    return skip if isinstance(skip, tuple) else (skip,)


def _cuda_torch(gpu_index: int) -> Any:
    """Return torch. Raises ToolchainMissing if it is not installed, DeviceError if it has no such GPU."""
    torch = needed("torch", "torch >= 2.6", "gpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= gpu_index < count:
        raise DeviceError(
            f"GPU {gpu_index} not found", f"an index below {count}" if count else "a CUDA GPU", "see `nvidia-smi -L`"
        )
    return torch
