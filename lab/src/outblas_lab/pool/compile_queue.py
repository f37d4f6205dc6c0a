"""Kernels of the units to come, compiled on a thread of the driver while workers time those before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from outblas_lab.pool.transport import Pair

if TYPE_CHECKING:
    from outblas_lab.pool.units import WorkUnit

#: Compiles the kernels of pairs into a cache; yields now and then.
Compile = Callable[[Sequence[Pair]], Iterator[object]]
#: Units compiled together at most: the first are wanted soon.
MAX_UNITS_TOGETHER = 8


class CompileQueue:
    """A queue that compiles the kernels of units in a background thread and gives the units back in their order.

    Args:
        compile: function that fills the compile cache that the workers share.
    """

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._todo: queue.SimpleQueue[WorkUnit | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[WorkUnit | Exception] = queue.SimpleQueue()
        self._stop = threading.Event()
        #: Units put and not given back; of the driver's thread alone.
        self._inside = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._inside > 0

    def put(self, unit: WorkUnit) -> None:
        self._inside += 1
        self._todo.put(unit)

    def done(self) -> list[WorkUnit]:
        """Return the units compiled since the last call.

        Raises:
            ToolchainMissing: NVRTC is not installed; or whatever else ended the thread.
        """
        found: list[WorkUnit] = []
        while not self._done.empty():
            item = self._done.get()
            if isinstance(item, Exception):
                raise item
            found.append(item)
        self._inside -= len(found)
        return found

    def close(self) -> None:
        """Cancel all waiting compilations; running ones finish in their processes."""
        self._stop.set()
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (unit := self._todo.get()) is not None and not self._stop.is_set():
            units = [unit]
            while len(units) < MAX_UNITS_TOGETHER and not self._todo.empty() and (more := self._todo.get()) is not None:
                units.append(more)
            try:
                for _ in self._compile([pair for one in units for pair in one.pairs]):
                    if self._stop.is_set():
                        return
            except Exception as error:  # the driver's to raise
                self._done.put(error)
                return
            for one in units:
                self._done.put(one)
            if self._stop.is_set():  # the None that ends the outer loop may have ended the inner one
                return
