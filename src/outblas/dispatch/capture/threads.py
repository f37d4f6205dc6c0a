"""Start threads inside contexts that watchers provide.

``threading.Thread.start`` is wrapped once while at least one watcher exists. Watchers may come and go in any order and
thread; the last one restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

#: Makes what one thread runs in.
Maker = Callable[[], AbstractContextManager[Any]]

_lock = threading.RLock()  # a signal's handler may come while this thread has it
_makers: list[Maker] = []
#: (our start, the one that it took the place of), where ours was set and not yet taken back.
_wrapped: list[tuple[Callable[..., None], Callable[..., None]]] = []


def wrap_new_threads(maker: Maker) -> None:
    """Run each thread that is started from now on inside a context manager of its own.

    Args:
        maker: function without arguments that returns a context manager.
    """
    with _lock:
        _makers.append(maker)
        if not _wrapped or threading.Thread.start is not _wrapped[-1][0]:
            _wrap()


def unwrap_new_threads(maker: Maker) -> None:
    """Undo one :func:`wrap_new_threads` with the same ``maker``. Threads that run already keep their context managers.

    A ``maker`` that was not added raises ValueError.
    """
    with _lock:
        _makers.remove(maker)
        if not _makers and threading.Thread.start is _wrapped[-1][0]:
            threading.Thread.start = _wrapped.pop()[1]  # type: ignore[method-assign]
        # Else someone has wrapped it since: theirs calls ours, which does nothing where nobody watches.


def replace_lock() -> None:
    """Make a new lock in a forked child, where the thread that held the old one does not exist."""
    global _lock
    _lock = threading.RLock()


def _wrap() -> None:
    start = threading.Thread.start

    def watched_start(thread: threading.Thread) -> None:
        with _lock:
            makers = tuple(_makers)
        if makers and not getattr(thread.run, "watched", False):  # ours may lie below another's wrapper, twice
            _watch_run(thread, makers)
        start(thread)

    _wrapped.append((watched_start, start))
    threading.Thread.start = watched_start  # type: ignore[method-assign,assignment]


def _watch_run(thread: threading.Thread, makers: tuple[Maker, ...]) -> None:
    run = thread.run

    def watched_run() -> None:
        with ExitStack() as stack:
            for maker in makers:
                stack.enter_context(maker())
            run()

    watched_run.watched = True  # type: ignore[attr-defined]
    thread.run = watched_run  # type: ignore[method-assign]
