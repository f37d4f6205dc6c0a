"""A worker process per GPU: a candidate that hangs, faults or exits costs one worker, never the run.

The driver sends a batch of items. The worker's handler announces each item as it begins it, and answers each when it is
done. If the worker is lost, the item announced last is to blame; the others go to its successor. If none was
announced, each item goes alone, so that the next loss names its cause.
A module-level factory makes the handler in the worker, so that everything crosses as plain pickles:

    handler = factory(*args)
    handler([(index, item), ...], emit)  # calls emit.begin(index), emit.done(index, value), any number of times
    handler.phase_timer                  # optional: its seconds per phase (outblas.core.phase_times)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from outblas.core.child_process import ChildProcess, close_inherited
from outblas.core.clean_text import clean_text
from outblas.core.errors import DeviceError
from outblas.core.evaluation import Status
from outblas.core.phase_times import PhaseTotals
from outblas.judge.faults import ContextLost

#: Seconds without a word from the worker: while it works, and while it starts (imports, CUDA context).
STEP_TIMEOUT_S, START_TIMEOUT_S = 30.0, 300.0
#: Seconds between two looks at a worker's memory and folder.
_WATCH_S = 1.0


#: Bytes of one message, and letters of its words, with a codec.
_MESSAGE_BYTES, _WORDS = 16 << 20, 400


class UnreadableMessage(Exception):
    """An error: a worker with a codec sent something that is no message of that form. It is no OutblasError."""


def receive(connection: Connection, codec: str | None, left: Collection[int]) -> Sequence[Any]:
    """Return a worker's next message as a tuple: its kind, then what belongs to it, e.g. ``("done", 0, value)``.

    Kinds: ``ready``, ``begin`` (index or None), ``done`` (index, value), ``fault`` (text), ``error`` (text), ``end``.

    Args:
        connection: pipe to the worker; the call waits for one. Without a codec ``ready`` and ``end`` have PhaseTotals.
        codec: module whose ``decode`` reads a value of ``done``; None: the message is unpickled and not checked.
        left: with a codec, indices that ``begin`` (or None) and ``done`` may name.

    Raises:
        UnreadableMessage: with a codec, the message has another form or names another index.
        EOFError: the pipe is closed.
        OSError: the pipe broke; with a codec, also a message above 16 MiB.
    """
    if codec is None:
        return connection.recv()  # type: ignore[no-any-return]
    data = connection.recv_bytes(_MESSAGE_BYTES)  # one that is longer closes the pipe: OSError
    try:
        kind, *rest = json.loads(data)
        if kind in ("ready", "end") and not rest:
            return (kind,)
        if kind in ("fault", "error") and len(rest) == 1 and isinstance(rest[0], str):
            return kind, clean_text(rest[0], _WORDS)
        if kind == "begin" and (rest == [None] or (_is_index(rest[0], left) and len(rest) == 1)):
            return kind, rest[0]
        if kind == "done" and _is_index(rest[0], left) and len(rest) == 2:
            return kind, rest[0], importlib.import_module(codec).decode(rest[1])
    except Exception as error:  # whatever a stranger's message does to a reader is the message's fault
        raise UnreadableMessage(f"{type(error).__name__}: {clean_text(str(error), _WORDS)}") from error
    raise UnreadableMessage("no message")


def _is_index(found: object, left: Collection[int]) -> bool:
    """Return True if ``found`` is an int that names an item.

    ``true`` and ``1.0`` do not, though they equal an index.
    """
    return type(found) is int and found in left


class PlainConnection:
    """A connection whose messages are JSON; accounts stay behind."""

    def __init__(self, connection: Connection, codec: str) -> None:
        self._connection, self._codec = connection, importlib.import_module(codec)

    def send(self, message: tuple[Any, ...]) -> None:
        if message[0] == "done":
            message = (*message[:2], self._codec.encode(message[2]))
        elif message[0] in ("ready", "end"):
            message = message[:1]
        self._connection.send_bytes(json.dumps(message).encode())


@dataclass(frozen=True)
class WorkerLoss:
    """The answer for an item that cost its worker.

    Attributes:
        status: ``Status.HANG`` (silence, or the batch's time was over), ``FAULT`` (context lost, fatal signal, too much
            memory) or ``EXITED`` (any other end).
    """

    status: Status
    detail: str


class Emit:
    """Send messages from the worker to the driver: ``emit.begin(0)`` before item 0, ``emit.done(0, value)`` after it.

    Args:
        connection: object with a method ``send``, such as a multiprocessing Connection. A message is a tuple.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection  # or whatever else has ``send``

    def begin(self, index: int | None) -> None:
        """Send ``("begin", index)``: from now on this item is to blame for a loss; None: no single item is."""
        self._connection.send(("begin", index))

    def done(self, index: int, value: Any) -> None:
        """Send ``("done", index, value)``; the answer is pickled, or encoded by the sandbox's codec."""
        self._connection.send(("done", index, value))


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """A worker process that is replaced each time it is lost. Use it as a context manager, or call :meth:`close`.

    :meth:`run`, or :meth:`start` before it, starts it. ``dict(box.run(items))``: index -> value or WorkerLoss.

    Args:
        factory: ``module:function`` that makes the handler in the worker.
        args: arguments of the factory, picklable.
        step_timeout_s: seconds of silence after which the worker counts as hung. Default: 30.
        start_timeout_s: seconds that the worker may take to start. Default: 300.
        codec: module for a worker that is not trusted. Its ``encode(value)`` makes JSON in the worker; its
            ``decode(data)`` reads it here. Nothing is unpickled, the worker's errors count as losses, and it is killed
            at the end. None: answers are pickled.
        limits: host memory and disk, watched every second; above them the worker is lost. None: no limit.
        batch_timeout_s: seconds for a batch, despite reports; after them the worker is lost. None: no limit.
        spawn: returns a new process that runs :func:`serve_sandbox` with the same codec, such as
            ``outblas_lab.jail.spare_worker.SpareWorker.take``. None: processes are started as they are needed.
    """

    def __init__(
        self, factory: str, args: tuple[Any, ...] = (), step_timeout_s: float = STEP_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S, codec: str | None = None, limits: HostLimits | None = None,
        batch_timeout_s: float | None = None, spawn: Callable[[], ChildProcess] | None = None,
    ) -> None:  # fmt: skip
        self._factory, self._args, self._codec = factory, args, codec
        self._limits, self._batch_s = limits, batch_timeout_s
        self._step_s, self._start_s = step_timeout_s, start_timeout_s
        self._spawn = spawn
        self._look = 0.0  # when the worker's memory and folder are looked at again
        self._child: ChildProcess | None = None
        self._past, self._present = PhaseTotals(), PhaseTotals()
        #: Workers lost so far.
        self.lost = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None before it starts, after a loss and after :meth:`close`."""
        return self._child.pid if self._child is not None else None

    @property
    def account(self) -> PhaseTotals:
        """Return the seconds per phase of all workers so far; a lost worker counts up to its last whole batch."""
        return self._past + self._present

    def run(self, items: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> Iterator[tuple[int, Any]]:
        """Yield the answers to a batch as (index, value), in the order of arrival. Nothing runs until it is iterated.

        Every item is answered exactly once. If an item costs its worker, its value is a :class:`WorkerLoss` and the
        others go to a new worker. Closing the iterator early kills the worker.

        Args:
            items: the batch; ``index`` counts its items from 0. An item must be picklable.
            meanwhile: function without arguments, called each time a worker was given items; its exception kills the
                worker and is raised.

        Raises:
            DeviceError: a worker cannot start, or a worker without a codec reports an error of the handler.
        """
        batches = [list(range(len(items)))]
        try:
            while batches:
                batch = batches.pop(0)
                left = set(batch)
                blamed, loss = yield from self._batch([(i, items[i]) for i in batch], left, meanwhile)
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
        except BaseException:  # closed early, or Ctrl-C: what the worker still has to say belongs to no later batch
            self._end(kill=True, count=False)
            raise

    def start(self) -> None:
        """Start the worker now and wait until it is ready; do nothing if it runs already.

        Raises:
            DeviceError: it cannot start: any error of the factory (also ToolchainMissing), its end, or the time limit.
        """
        try:
            self._ready()
        except BaseException:  # Ctrl-C: half started, it would owe a hello to the first batch
            self._end(kill=True, count=False)
            raise

    def close(self) -> None:
        """End the worker; harmless when done twice. It is not counted as lost. A later batch starts a new one."""
        self._end(kill=self._codec is not None, count=False)

    def _batch(
        self, batch: list[tuple[int, Any]], left: set[int], meanwhile: Callable[[], None] | None
    ) -> Generator[tuple[int, Any], None, tuple[int | None, WorkerLoss | None]]:
        """Run one batch; answered items leave ``left``. Returns whom to blame, if anyone, and the loss, if any."""
        child = self._ready()
        connection = child.connection
        current: int | None = None
        end = None if self._batch_s is None else time.monotonic() + self._batch_s
        try:
            connection.send(batch)
        except OSError:
            return None, self._obituary(child)
        if meanwhile is not None:
            meanwhile()
        try:
            while True:
                if (loss := self._silent(child, end)) is not None:
                    self._end(kill=True)
                    return current, loss
                try:
                    kind, *rest = self._received(child, left)
                except UnreadableMessage as error:
                    self._end(kill=True)
                    return current, WorkerLoss(Status.EXITED, f"the worker sent an unreadable message ({error})")
                if kind == "begin":
                    current = rest[0]
                elif kind == "done":
                    left.discard(rest[0])
                    current = None if current == rest[0] else current
                    yield rest[0], rest[1]
                elif kind == "fault":
                    self._end(kill=True)
                    return current, WorkerLoss(Status.FAULT, rest[0])
                elif kind == "error":
                    self._end(kill=True)
                    if self._codec is not None:  # by what was run there, for all that we know
                        return current, WorkerLoss(Status.EXITED, f"the worker failed: {rest[0]}")
                    raise DeviceError(f"the evaluator failed: {rest[0]}", "an evaluation result", "report this bug")
                elif kind == "end":
                    self._present = rest[0] if rest else PhaseTotals()
                    if not left:
                        return None, None
                    return min(left), WorkerLoss(Status.EXITED, "the worker did not answer")
        except (EOFError, OSError):
            return current, self._obituary(child)

    def _received(self, child: ChildProcess, left: Collection[int]) -> Sequence[Any]:
        """The next message; a worker that is not trusted may have begun one that it never ends."""
        if self._codec is None:
            return receive(child.connection, None, left)
        overdue = threading.Timer(self._step_s, child.kill)
        overdue.start()
        try:
            return receive(child.connection, self._codec, left)
        finally:
            overdue.cancel()

    def _silent(self, child: ChildProcess, end: float | None) -> WorkerLoss | None:
        """Wait for the worker's next word; why it is given up if that does not come."""
        deadline = time.monotonic() + self._step_s
        while True:
            now = time.monotonic()
            if end is not None and now > end:
                return WorkerLoss(Status.HANG, f"the batch did not finish within {self._batch_s:g} s")
            if self._limits is not None and now >= self._look:  # also at one that never stops talking
                self._look = now + _WATCH_S
                if over := self._limits.why_over(child.pid):
                    return WorkerLoss(Status.FAULT, over)
            wait = deadline - now if end is None else min(deadline, end) - now
            if child.connection.poll(max(0.0, wait if self._limits is None else min(wait, _WATCH_S))):
                return None
            if time.monotonic() >= deadline:
                return WorkerLoss(Status.HANG, f"no answer within {self._step_s:g} s")

    def _obituary(self, child: ChildProcess) -> WorkerLoss:
        code = child.exit_code()
        self._end(kill=True)
        if code is not None and code < 0 and -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL):
            return WorkerLoss(Status.FAULT, f"the worker died of {signal.Signals(-code).name}")
        ended = f"ended with exit code {code}" if code is not None else "closed its pipe and kept running"
        return WorkerLoss(Status.EXITED, f"the worker {ended}")

    def _ready(self) -> ChildProcess:
        """Return a worker that has reported that it is ready."""
        if self._child is not None and not self._child.is_alive():
            self._end(kill=True)
        if self._child is not None:
            return self._child
        child = self._child = self._spawn() if self._spawn else ChildProcess(serve_sandbox, (self._codec,))
        reason = f"it did not start within {self._start_s:g} s"
        try:
            child.connection.send((self._factory, self._args))
            if child.connection.poll(self._start_s):
                kind, *rest = receive(child.connection, self._codec, ())
                if kind == "ready":
                    self._present = rest[0] if rest else PhaseTotals()
                    return child
                reason = str(rest[0]) if rest else f"its first message was {kind!r}"
        except UnreadableMessage as error:
            reason = str(error)
        except (EOFError, OSError):
            reason = f"it ended with exit code {child.exit_code()}"
        self._end(kill=True, count=False)
        raise DeviceError(f"the evaluation worker cannot start: {reason}", "access to the GPU", "run outblas doctor")

    def _end(self, kill: bool, count: bool = True) -> None:
        child, self._child = self._child, None
        self._past, self._present = self.account, PhaseTotals()
        if child is not None:
            child.end(kill)
            self.lost += kill and count


def factory_name(factory: Callable[..., Any]) -> str:
    """Return the name of a module's function or class for :func:`make_from_name`, ``module:name``."""
    return f"{factory.__module__}:{factory.__qualname__}"


def make_from_name(factory: str, args: tuple[Any, ...]) -> Any:
    """Import ``module`` of ``module:name``, return ``name(*args)``. ``("math:sqrt", (4.0,))`` gives 2.0."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def serve_sandbox(connection: Connection, codec: str | None = None, prepare: str | None = None) -> None:
    """Run the worker process: wait for its turn, make the handler, then serve batches until the pipe closes.

    The turn is the sandbox's first message: the factory and its arguments. A worker without a turn ends with the pipe.

    Args:
        codec: module that encodes answers as JSON, see :class:`Sandbox`; None: they are pickled.
        prepare: ``module:function`` that is called before the turn. It must not touch a GPU, which another worker may
            be using.
    """
    if codec is not None:  # before anything is imported that opens files of its own, such as CUDA
        close_inherited(connection)
    if prepare is not None:
        with contextlib.suppress(Exception):  # the factory meets the same error, and reports it
            make_from_name(prepare, ())
    try:
        factory, args = connection.recv()
    except (EOFError, OSError):
        return  # nothing is left to do for it
    voice: Any = connection if codec is None else PlainConnection(connection, codec)
    try:
        handler: Callable[[list[Any], Emit], None] = make_from_name(factory, args)
    except Exception as error:
        voice.send(("error", f"{type(error).__name__}: {error}"))
        return
    phase_timer = getattr(handler, "phase_timer", None)
    voice.send(("ready", phase_timer.totals() if phase_timer else PhaseTotals()))
    while True:
        try:
            batch: list[tuple[int, Any]] = connection.recv()
        except (EOFError, OSError):
            return
        try:
            handler(batch, Emit(voice))
        except ContextLost as fault:
            with contextlib.suppress(OSError):
                voice.send(("fault", str(fault)))
            os._exit(1)  # the CUDA context is lost: its destructors would only fail
        except Exception as error:
            with contextlib.suppress(OSError):  # the driver may be gone
                voice.send(("error", f"{type(error).__name__}: {error}"))
            return
        voice.send(("end", phase_timer.totals() if phase_timer else PhaseTotals()))


#: Entries of a worker's folder that are counted; a folder with more is over its limit.
_MOST_ENTRIES = 10_000
_BLOCK = 512  # of st_blocks, whatever the file system's own is


@dataclass(frozen=True)
class HostLimits:
    """Limits on a worker's use of the host. Its driver looks every second.

    Attributes:
        memory_bytes: host memory, files in memory included.
        folder: the worker's own folder; None: none is watched.
        folder_bytes: bytes on the disk beneath that folder.
    """

    memory_bytes: int
    folder: str | None = None
    folder_bytes: int = 4 << 30

    def why_over(self, pid: int | None) -> str:
        """Return the limit that a process has passed, in words; empty if it keeps all.

        Args:
            pid: the process; None: one that has ended.
        """
        if (used := resident_bytes(pid) + memory_file_bytes(pid)) > self.memory_bytes:
            return f"it used {_mib(used)} MiB of host memory, more than {self.memory_bytes >> 20}"
        if self.folder is None:
            return ""
        used, entries = folder_usage(self.folder)
        if used > self.folder_bytes or entries > _MOST_ENTRIES:
            return f"it used {_mib(used)} MiB of disk for {entries} files, more than {self.folder_bytes >> 20}"
        return ""


def _mib(used: int) -> int:
    """Return bytes in MiB, rounded up, so that a use above a limit does not read as the limit."""
    return -(-used >> 20)


def resident_bytes(pid: int | None) -> int:
    """Return the resident host memory of a process in bytes, e.g. 290308096; 0 for None, or if it is not known."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_file_bytes(pid: int | None) -> int:
    """Return the bytes of the files in memory (``memfd``) that a process has open; 0 if they are not known.

    A file that is open several times counts once.
    """
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path).startswith("/memfd:"):
                    state = os.stat(entry.path)
                    found[state.st_ino] = state.st_blocks * _BLOCK
    return sum(found.values())


def folder_usage(folder: str) -> tuple[int, int]:
    """Return (bytes on the disk, entries) beneath a folder. The count ends after the most entries allowed.

    No link is followed. Entries that vanish meanwhile do not count.
    """
    used, entries, waiting = 0, 0, [folder]
    while waiting and entries <= _MOST_ENTRIES:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                if entries > _MOST_ENTRIES:
                    break
                with contextlib.suppress(OSError):
                    used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return used, entries
