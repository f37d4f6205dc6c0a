"""Work behind a program's back, for which its end does not wait longer than it must."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class BackgroundQueue:
    """Does one thing after the other on a thread that lives while there is something to do.

    The interpreter joins executors' threads at its end, and they first do all that they were given. This thread is
    joined, too, for what runs in a compiler must not meet a process that is being torn down; but it leaves out what it
    has not begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._left: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._works = False
        # Held over Python code, amid which a signal's handler of the same thread may ask, too.
        self._lock = threading.RLock()

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
        """What ``do(*arguments)`` will return or raise (cancelled where the interpreter ends before it is begun); None:
        no thread can be had, or the interpreter is about to end."""
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
            except RuntimeError:  # no thread can be had: none at the interpreter's end, say
                self._works = False
                self._left.remove(task)
                return None
        return future

    def _work(self) -> None:
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
            del future, do, arguments  # what is done is nobody's to keep
