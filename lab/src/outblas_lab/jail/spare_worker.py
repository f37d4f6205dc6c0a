"""A worker process that has started before a sandbox needs it."""

from __future__ import annotations

from outblas.core.child_process import ChildProcess
from outblas.workers.sandbox import serve_sandbox


class SpareWorker:
    """Keep one worker process ready for the next sandbox. Call :meth:`close` at the end.

    The constructor starts nothing. A spare worker runs ``prepare`` and then waits; it gets factory, arguments and items
    from the sandbox that takes it. Each process serves one sandbox, so nothing goes over from one to the next. Like
    every child process it ends with its parent.

    Args:
        prepare: ``module:function`` without arguments. It imports modules and must not touch a GPU, on which another
            worker may be timing.
    """

    def __init__(self, prepare: str, codec: str | None = None) -> None:
        self._prepare, self._codec = prepare, codec
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker that waits; None if no worker does."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Begin to start a worker, unless one waits already. Return at once."""
        if self._child is not None and not self._child.is_alive():
            self.close()
        if self._child is None:
            self._child = ChildProcess(serve_sandbox, (self._codec, self._prepare))

    def take(self) -> ChildProcess:
        """Return the worker that waits, or a new one. The caller ends it."""
        self.start()
        child, self._child = self._child, None
        assert child is not None
        return child

    def close(self) -> None:
        """End the worker that waits. A second call does nothing; a later :meth:`start` starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.end(kill=True)
