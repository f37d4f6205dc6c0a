"""A background queue on one thread. At interpreter exit the running task finishes; queued ones are cancelled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class BackgroundQueue:
    """Runs submitted functions one after the other on one thread.

    The thread exists only while tasks are queued or running. At interpreter exit the running task finishes, because a
    compiler must not run in a process that is being torn down. Queued tasks are cancelled. (An executor of
    ``concurrent.futures`` would run them all first.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._left: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._works = False
        # Reentrant: a signal handler may call submit while this thread holds the lock.
        self._lock = threading.RLock()

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
        """Queue a call of ``do(*arguments)`` and return without waiting for it.

        Args:
            do: function to call on the queue's thread, after all earlier tasks.

        Returns:
            A ``concurrent.futures.Future``: ``result()`` waits for the call, and returns its result or raises its
                exception. It is cancelled if the interpreter exits before the call starts. None if no thread can be
                started, or if the interpreter is already exiting.
        """
        future: Future[Any] = Future()
        with self._lock:
            if not threading.main_thread().is_alive():
                return None
            task = (future, do, arguments)
            self._left.append(task)
            if self._works:
                return future
            self._works = True
            try:
                threading.Thread(target=self._work, name=self._name, daemon=False).start()
            except RuntimeError:  # e.g. at interpreter exit
                self._works = False
                self._left.remove(task)
                return None
        return future

    def _work(self) -> None:
        """Run queued tasks until the queue is empty; cancel them once the main thread has ended."""
        while True:
            with self._lock:
                if not self._left:
                    self._works = False
                    return
                future, do, arguments = self._left.popleft()
            if not threading.main_thread().is_alive():
                future.cancel()
                continue
            try:
                result = do(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, do, arguments  # or the queue would keep a finished task's objects alive
