"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from outblas.bench.pool.transport import EvaluatorSpec, Event, Task
from outblas.bench.pool.worker_host import serve_connection
from outblas.core.child_process import ChildProcess


class LocalTransport:
    """A transport with one spawned process per spec (the contract of outblas.bench.pool.transport).

    Args:
        specs: spec of each worker; worker numbers are indices of it.
    """

    def __init__(self, specs: Sequence[EvaluatorSpec]) -> None:
        self._specs = tuple(specs)
        self._children: dict[int, ChildProcess] = {}
        self._busy: set[int] = set()

    @property
    def size(self) -> int:
        return len(self._specs)

    def pid(self, worker: int) -> int | None:
        """Return the process id of a worker; None if it is gone."""
        return self._children[worker].pid if worker in self._children else None

    def start(self, worker: int) -> None:
        self.stop(worker)
        self._busy.add(worker)  # until it says hello
        self._children[worker] = ChildProcess(
            serve_connection, (self._specs[worker],), daemon=False
        )  # its sandbox is its child

    def send(self, worker: int, task: Task) -> None:
        self._busy.add(worker)
        with contextlib.suppress(OSError):  # wait() tells of it
            self._children[worker].connection.send(task)

    def wait(self, timeout_s: float) -> list[Event]:
        if not self._children:
            time.sleep(timeout_s)
            return []
        by_pipe = {child.connection: worker for worker, child in self._children.items()}
        return [self._heard(by_pipe[pipe]) for pipe in wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def stop(self, worker: int) -> None:
        self._busy.discard(worker)
        if worker in self._children:
            self._children.pop(worker).end(kill=True)

    def close(self) -> None:
        for worker in [*self._busy]:
            self.stop(worker)
        children = [*self._children.values()]
        self._children.clear()
        for child in children:
            child.connection.close()  # all of them stop listening before the first is waited for
        for child in children:
            child.end(kill=False)

    def _heard(self, worker: int) -> Event:
        try:
            kind, value = self._children[worker].connection.recv()
        except (EOFError, OSError):
            code = self._children[worker].exit_code()
            self.stop(worker)
            return Event(worker, "lost", f"its process ended with exit code {code}")
        if kind != "answer":
            self._busy.discard(worker)
        return Event(worker, kind, value)
