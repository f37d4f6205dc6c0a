"""Time pieces of work on one stream, queued behind a spinning kernel so that the host's speed does not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.rivals import BaselineCall
from outblas.runtime.driver import capture_graph, check, driver

#: Tries to queue a round ahead of the GPU; longest plug.
TRIES, MAX_PLUG_US = 10, 50_000.0
#: Length of the first plug.
_FIRST_PLUG_US = 200.0
#: Cycles that a plug spins per microsecond: a bound on the SM clock in MHz.
_CYCLES_PER_US = 2000


class HostBehindGpu(DeviceError):
    """The host could not queue a round ahead of the GPU."""


class StreamClock:
    """A stream and the events by which work on it is timed. Call :meth:`close` after use."""

    def __init__(self, torch_stream: Any) -> None:
        self.torch_stream = torch_stream
        self.stream: int = torch_stream.cuda_stream
        self._events: list[tuple[Any, Any]] = []
        self._plug_us = _FIRST_PLUG_US
        self.limit(TRIES, MAX_PLUG_US)

    def limit(self, tries: int, max_plug_us: float) -> None:
        """Set the tries to queue a round ahead of the GPU, and the longest plug, microseconds."""
        self._tries, self._max_plug_us = tries, max_plug_us
        self._plug_us = min(self._plug_us, max_plug_us)

    def close(self) -> None:
        """Destroy the events; harmless when done twice."""
        for pair in self._events:
            for event in pair:
                driver().cuEventDestroy(event)
        self._events.clear()

    def synchronize(self) -> None:
        """Wait for the clock's stream. Raises DeviceError if something on it failed."""
        check("cuStreamSynchronize", driver().cuStreamSynchronize(self.stream))

    def timed(self, works: Sequence[Callable[[], Any]], before: Callable[[], None] | None = None) -> list[float]:
        """Return the microseconds of every piece of work, queued together behind a plug; see the module's text.

        Args:
            works: functions that enqueue work on the clock's stream. Each is timed between two events of its own.
            before: enqueues what precedes each piece of work and is not timed; None: nothing.

        Raises:
            HostBehindGpu: the host cannot queue ahead of the GPU.
            DeviceError: a launch fails.
        """
        for _ in range(self._tries):
            ahead = self._queue(works, before)
            self.synchronize()
            if ahead:
                elapsed = driver().cuEventElapsedTime
                return [
                    1000.0 * check("cuEventElapsedTime", elapsed(start, stop))
                    for start, stop in self._events[: len(works)]
                ]
            self._plug_us = min(self._max_plug_us, 2.0 * self._plug_us)
        raise HostBehindGpu(
            f"the host could not queue {len(works)} launches ahead of the GPU in {self._tries} tries",
            "a host with a free CPU core",
            "leave a CPU core free for the timing process",
        )

    def _queue(self, works: Sequence[Callable[[], Any]], before: Callable[[], None] | None) -> bool:
        """Queue a round; True if no work's start event had passed before the work itself was queued."""
        self._more_events(len(works))
        begin = perf_counter()
        self._plug(int(self._plug_us * _CYCLES_PER_US))
        ahead = True
        for work, (start, stop) in zip(works, self._events, strict=False):
            if before is not None:
                before()
            self._record(start)
            work()
            ahead &= self._is_pending(start)
            self._record(stop)
        spent_us = 1e6 * (perf_counter() - begin)
        if ahead:  # follow the host's own pace, slowly downwards
            self._plug_us = min(self._max_plug_us, max(1.5 * spent_us + 20.0, 0.8 * self._plug_us))
        return ahead

    def _plug(self, cycles: int) -> None:
        import torch

        with torch.cuda.stream(self.torch_stream):
            torch.cuda._sleep(cycles)

    def _record(self, event: Any) -> None:
        """Enqueue an event on the clock's stream."""
        check("cuEventRecord", driver().cuEventRecord(event, self.stream))

    def _is_pending(self, event: Any) -> bool:
        """Return True if the GPU has not come to an event yet, and nothing has failed."""
        cu = driver()
        return int(cu.cuEventQuery(event)[0]) == int(cu.CUresult.CUDA_ERROR_NOT_READY)

    def _more_events(self, count: int) -> None:
        cu = driver()
        while len(self._events) < count:
            first, second = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
            self._events.append((first, second))


def instantiate(calls: Sequence[BaselineCall], stream: int, change: Callable[[Any], None] | None = None) -> Any:
    """Return the CUgraphExec of calls that run one after the other. The caller must destroy it.

    Args:
        calls: the calls; each has run before, so that all is loaded.
        change: function that is given the CUgraph before it is instantiated; None: nothing.

    Raises:
        DeviceError: the capture fails, as a call synchronises, allocates or leaves its stream.
    """
    graph = capture_graph(calls, stream)
    try:
        if change is not None:
            change(graph)
        return check("cuGraphInstantiate", driver().cuGraphInstantiate(graph, 0))
    finally:
        driver().cuGraphDestroy(graph)
