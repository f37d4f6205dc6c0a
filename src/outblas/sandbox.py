"""One worker process per GPU: a candidate that hangs, faults or exits costs one worker, never the run.

The driver sends a batch of items; the worker's handler announces each item as it begins it and answers
each when it is done. When the worker is lost, the item announced last is to blame; the others go to its
successor. If none was announced, each goes alone, so that the next loss names its cause.

The handler is made in the worker by a module-level factory, so that everything crosses as plain pickles:

    handler = factory(*args)
    handler(items, emit)      # calls emit.begin(i), emit.done(i, value), any number of times
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from outblas.errors import DeviceError
from outblas.evaluation import Status

#: Seconds without a word from the worker: while it works, and while it starts (imports, CUDA context).
STEP_TIMEOUT_S, START_TIMEOUT_S = 30.0, 300.0
_JOIN_S = 5.0


@dataclass(frozen=True)
class Lost:
    """An item that cost its worker: HANG, FAULT or EXITED, and one line on it."""

    status: Status
    detail: str


class Faulted(Exception):
    """Raised by a handler when the process' CUDA context is lost: report, then end this worker."""


class Emit:
    """The worker's voice."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, index: int | None) -> None:
        """Item ``index`` is being worked on from now on (None: no single one)."""
        self._connection.send(("begin", index))

    def done(self, index: int, value: Any) -> None:
        """The answer to one item."""
        self._connection.send(("done", index, value))


class Sandbox:
    """A worker that is replaced whenever it is lost.

    Args:
        factory: ``module:function`` that makes the handler in the worker. args: its arguments, picklable.
        step_timeout_s: seconds without a word after which the worker counts as hung.

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self, factory: str, args: tuple[Any, ...] = (), step_timeout_s: float = STEP_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._factory, self._args = factory, args
        self._step_s, self._start_s = step_timeout_s, start_timeout_s
        self._process: Any = None
        self._connection: Connection | None = None
        #: Workers lost so far.
        self.lost = 0

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None before the first batch and after a loss."""
        return self._process.pid if self._process is not None else None

    def run(self, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Answers as (index, value) in the order they come; a value is :class:`Lost` if the item cost its worker.

        Every item is answered exactly once. Closing the iterator early stops the worker.

        Raises:
            DeviceError: a worker cannot even start.
        """
        batches = [list(range(len(items)))]
        try:
            while batches:
                batch = batches.pop(0)
                left = set(batch)
                blamed, loss = yield from self._batch([(i, items[i]) for i in batch], left)
                if loss is None:
                    continue
                if blamed is None and len(left) == 1:
                    (blamed,) = left
                if blamed is not None and blamed in left:
                    left.discard(blamed)
                    yield blamed, loss
                    batches = ([sorted(left)] if left else []) + batches
                else:
                    batches = [[i] for i in sorted(left)] + batches
        except GeneratorExit:
            self._end(kill=True, count=False)
            raise

    def close(self) -> None:
        """End the worker; harmless when done twice. No zombie is left."""
        self._end(kill=False)

    def _batch(
        self, batch: list[tuple[int, Any]], left: set[int]
    ) -> Generator[tuple[int, Any], None, tuple[int | None, Lost | None]]:
        """Run one batch; answered items leave ``left``. Returns whom to blame, if anyone, and the loss, if any."""
        connection = self._ready()
        current: int | None = None
        try:
            connection.send(batch)
            while True:
                if not connection.poll(self._step_s):
                    self._end(kill=True)
                    return current, Lost(Status.HANG, f"no answer within {self._step_s:g} s")
                kind, *rest = connection.recv()
                if kind == "begin":
                    current = rest[0]
                elif kind == "done":
                    left.discard(rest[0])
                    current = None if current == rest[0] else current
                    yield rest[0], rest[1]
                elif kind == "fault":
                    self._end(kill=True)
                    return current, Lost(Status.FAULT, rest[0])
                elif kind == "error":
                    self._end(kill=True)
                    raise DeviceError(
                        f"the evaluator failed: {rest[0]}", "an evaluator without errors", "report this bug"
                    )
                elif kind == "end":
                    if not left:
                        return None, None
                    return min(left), Lost(Status.EXITED, "the worker left it unanswered")
        except (EOFError, OSError):
            return current, self._obituary()

    def _obituary(self) -> Lost:
        """What ended the worker, after its pipe broke."""
        process = self._process
        process.join(_JOIN_S)
        code = process.exitcode
        self._end(kill=True)
        if code is not None and code < 0 and -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL):
            return Lost(Status.FAULT, f"the worker died of {signal.Signals(-code).name}")
        return Lost(Status.EXITED, f"the worker ended with exit code {code}")

    def _ready(self) -> Connection:
        """The connection of a worker that has said hello."""
        if self._process is not None and not self._process.is_alive():
            self._end(kill=True)
        if self._connection is not None:
            return self._connection
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, self._factory, self._args, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection = ours
        reason = f"it did not start within {self._start_s:g} s"
        try:
            if ours.poll(self._start_s):
                kind, *rest = ours.recv()
                if kind == "ready":
                    return ours
                reason = str(rest[0])
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            reason = f"it ended with exit code {self._process.exitcode}"
        self._end(kill=True, count=False)
        raise DeviceError(
            f"the evaluation worker cannot start: {reason}", "a working GPU process", "run outblas doctor"
        )

    def _end(self, kill: bool, count: bool = True) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()  # a worker that listens ends by itself
        if process is None:
            return
        if not kill:
            process.join(_JOIN_S)
        if process.is_alive():
            process.kill()
            process.join(_JOIN_S)
        if kill and count:
            self.lost += 1
        if not process.is_alive():
            process.close()


def _work(connection: Connection, factory: str, args: tuple[Any, ...], parent: int) -> None:
    """The worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    try:
        module, _, name = factory.partition(":")
        handler: Callable[[list[Any], Emit], None] = getattr(importlib.import_module(module), name)(*args)
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready",))
    while True:
        try:
            batch: list[tuple[int, Any]] = connection.recv()
        except (EOFError, OSError):
            return
        try:
            handler(batch, Emit(connection))
        except Faulted as fault:
            with contextlib.suppress(OSError):
                connection.send(("fault", str(fault)))
            os._exit(1)  # the CUDA context is lost: its destructors would only fail
        except Exception as error:
            with contextlib.suppress(OSError):  # the driver may be gone
                connection.send(("error", f"{type(error).__name__}: {error}"))
            return
        connection.send(("end",))


def follow(parent: int) -> None:
    """End with the driver, even when it was killed and this process is stuck in a call."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
