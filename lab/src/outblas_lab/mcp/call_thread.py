"""A daemon thread that runs calls in their order, so that the protocol's loop stays free."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class CallThread:
    """A thread that runs one call at a time. A cancelled call that has not begun is left out.

    The thread is a daemon: a call that never returns does not hold the end of the program.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="outblas-tools", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Queue a call and return its future."""
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def finish(self, seconds: float) -> bool:
        """Take no more calls and wait for the running one. Return False if it still runs after ``seconds``."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # belongs to the waiting side
                future.set_exception(error)
