"""``outblas.capture``: record the products that a block of code, or a whole program, runs."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from outblas.captured import Captured, Product
from outblas.errors import ToolchainMissing, UsageError
from outblas.provenance import collect

#: A record is written again when it is older than this, seconds: what a killed program may lose.
WRITE_EVERY_S = 10.0


class capture:
    """Record the matrix products of a ``with`` block, by shape, layout and dtype, with their counts.

    ``with outblas.capture("problems.json") as c: model(x)`` writes the file when the block ends, also by an exception;
    ``c.captured`` has the products at any time. Seen are the thread that enters the block and threads that are started
    in it; :mod:`outblas.capture_mode` says what is not seen. Works on CPU tensors, too. While it is on, products are
    torch's, and cost the host some microseconds more.

    Args:
        path: the JSON file; None: none is written. A file that is there is replaced, or added to if ``append``.
        clock: seconds, monotonic. A record is written in between, too, so that little is lost with a killed process.

    Raises:
        UsageError: entered a second time, or ``append`` without a path.
        RecordError: the file to be added to is damaged (before anything runs), or it cannot be written.
        ToolchainMissing: torch is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        append: bool = False,
        *,
        command: str = "outblas.capture",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if append and path is None:
            raise UsageError("append without a path", "the file to add to", "pass its path")
        self._path, self._clock, self._command = path, clock, command
        self._before = Captured.load(path) if append and path is not None and os.path.exists(path) else None
        self._counts: Counter[Product] = Counter()
        self._lock = threading.RLock()  # a signal's handler may write while this thread counts
        self._mode: Any = None
        self._threads = _NewThreads(self._new_mode)
        self._open = False
        self._pid = os.getpid()
        self._provenance: dict[str, Any] = {}

    def __enter__(self) -> capture:
        if self._mode is not None:
            raise UsageError("a capture is entered twice", "a block each", "make another outblas.capture")
        self._provenance = collect(self._command)  # now: asking for it starts processes
        self._mode, self._open = self._new_mode(), True
        self._written = self._clock()
        self._threads.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._mode.__exit__(*what)
        self._threads.__exit__(*what)
        self._open = False
        self.write()

    @property
    def captured(self) -> Captured:
        """What was recorded so far, without what the file held before."""
        with self._lock:
            return Captured(dict(self._counts), (self._provenance,))

    def write(self) -> None:
        """Write the file now, if there is one to be written; a forked child never does."""
        if self._path is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._written = self._clock()
            (self.captured if self._before is None else self._before + self.captured).save(self._path)

    def _note(self, product: Product) -> None:
        if not self._open:
            return  # a thread that outlives the block
        with self._lock:
            self._counts[product] += 1
            late = self._clock() - self._written > WRITE_EVERY_S
        if late:
            self.write()

    def _new_mode(self) -> AbstractContextManager[Any]:
        try:
            from outblas.capture_mode import ProductMode
        except ImportError as error:
            raise ToolchainMissing("torch is not installed", "torch", "pip install 'outblas[gpu]'") from error
        mode: AbstractContextManager[Any] = ProductMode(self._note)
        return mode


class _NewThreads:
    """While entered, every ``threading.Thread`` that is started runs inside a context of its own."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._start = start = threading.Thread.start
        make = self._make

        def watched_start(thread: threading.Thread) -> None:
            run = thread.run

            def watched_run() -> None:
                with make():
                    run()

            thread.run = watched_run  # type: ignore[method-assign]
            start(thread)

        self._ours = watched_start
        threading.Thread.start = watched_start  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        if threading.Thread.start is self._ours:  # else someone has wrapped it since: that one stays
            threading.Thread.start = self._start  # type: ignore[method-assign]
