"""Workers of a pool in this process, by a clock that only their work moves."""

from __future__ import annotations

from collections.abc import Callable

from outblas.bench.pool.transport import EvaluatorSpec, Event, Task
from outblas.bench.pool.worker_host import WorkerHost


class VirtualTransport:
    """Workers in this process; a task takes ``seconds(task)`` of a clock of its own."""

    def __init__(self, size: int, seconds: Callable[[Task], float], factory: str = "support.pool_workers:Many") -> None:
        self._hosts = [WorkerHost(EvaluatorSpec(factory)) for _ in range(size)]
        self.size, self._seconds, self.now = size, seconds, 0.0
        self._coming: list[tuple[float, int, list[Event]]] = []

    def start(self, worker: int) -> None:
        self._coming.append((self.now, worker, [Event(worker, *self._hosts[worker].hello())]))

    def send(self, worker: int, task: Task) -> None:
        words = [Event(worker, *message) for message in self._hosts[worker].messages(task)]
        self._coming.append((self.now + self._seconds(task), worker, words))

    def wait(self, timeout_s: float) -> list[Event]:
        due = min(self._coming, default=None, key=lambda item: item[:2])
        if due is None or (timeout_s == 0 and due[0] > self.now):
            return []
        self._coming.remove(due)
        self.now = due[0]
        return due[2]

    def stop(self, worker: int) -> None:
        self._coming = [item for item in self._coming if item[1] != worker]

    def close(self) -> None:
        self._coming = []
