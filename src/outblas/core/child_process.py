"""A spawned child process with a pipe. It ends with its parent and leaves no zombie.

A process of :class:`LoneContext` does not import the program's main module, as other spawned ones do. A script without
``if __name__ == "__main__"`` would run anew there. One that imports torch would start each process seconds later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

JOIN_TIMEOUT_S = 5.0
#: Held while the main module is hidden.
_hiding = threading.Lock()
#: Polling interval, seconds, for the exit of a process that has closed its sentinel pipe.
_LOOK_S = 0.02
#: Targets of links in /proc/self/fd: CUDA's device files, and descriptors without a file name.
_CUDA_FILES, _NAMELESS = "/dev/nvidia", ("anon_inode:", "pipe:", "socket:")


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide name and file of the main module, by which a spawned process would import it."""
    main = sys.modules["__main__"].__dict__
    with _hiding:
        names: tuple[str, ...] = ("__spec__", "__file__")
        kept = {name: main.pop(name) for name in names if name in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(kept)


@contextlib.contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Hold Ctrl-C back on this thread, and in a process that starts meanwhile until :func:`end_with_parent` ignores it.

    Without that, Ctrl-C at a terminal ends a process that is still importing, with a traceback.
    """
    resource_tracker.getfd()  # starts multiprocessing's tracker if need be, which would release Ctrl-C
    was = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was)


class LoneProcess(SpawnProcess):
    """A spawned process that does not import the program's main module. It must call :func:`end_with_parent`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        with _hidden_main(), _ctrl_c_held():
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class LoneContext(SpawnContext):
    """A context of multiprocessing for functions that are not of the main module."""

    Process = LoneProcess  # type: ignore[assignment]


class ChildProcess:
    """A process that runs ``target(connection, *args)`` and has a pipe to this one.

    The constructor starts the process and does not wait for it. ``target`` should return when the pipe is closed
    (``recv`` then raises EOFError). The process ignores Ctrl-C and exits when its parent does.

    Args:
        target: function to run, importable by name (the process is spawned, not forked), and not of the main module.
        args: its arguments after the connection; they must pickle.
        daemon: False for a process that starts children of its own, which multiprocessing forbids to daemons.

    Attributes:
        connection: this side of the two-way pipe, a ``multiprocessing.connection.Connection``.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool = True) -> None:
        context = LoneContext()
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, target, args, os.getpid()), daemon=daemon)
        self._process.start()
        theirs.close()
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Return the process id. Raises ValueError after :meth:`end`."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True if the process still runs, False if it has ended.

        Raises:
            ValueError: :meth:`end` was called before.
        """
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        """Wait up to 5 s for the process to end, and return its exit code.

        Returns:
            The exit code: 0 if ``target`` returned, 1 if it raised; -N if signal N ended the process, e.g. -9 after
                :meth:`kill`. None if it still runs.

        Raises:
            ValueError: :meth:`end` was called before.
        """
        self._wait()
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL, which breaks the pipe. Call :meth:`end` afterwards. Does nothing after :meth:`end`."""
        with contextlib.suppress(ValueError):  # already closed by end()
            self._process.kill()

    def end(self, kill: bool) -> None:
        """Close the pipe and end the process. A second call does nothing if the process has ended.

        Args:
            kill: True kills the process at once. False waits up to 5 s for it to return, then kills it.
        """
        if self._ended:
            return
        with contextlib.suppress(OSError):
            self.connection.close()  # a process that reads its pipe then returns
        if not kill:
            self._wait()
        if self._process.is_alive():
            self._process.kill()
            self._wait()
        if not self._process.is_alive():
            self._process.close()
            self._ended = True

    def _wait(self) -> None:
        """Wait for the process to end, at most JOIN_TIMEOUT_S.

        ``Process.join`` is not used: it waits without limit for a process that closed its descriptors and still runs.
        Untrusted code can do that.
        """
        end = time.monotonic() + JOIN_TIMEOUT_S
        wait_for([self._process.sentinel], JOIN_TIMEOUT_S)
        while self._process.is_alive() and time.monotonic() < end:
            time.sleep(_LOOK_S)


def close_inherited(kept: Connection) -> None:
    """Redirect every descriptor of this process to /dev/null, except 0, 1, 2 and ``kept``.

    Call it first in a process that will run untrusted code. ``spawn`` passes on descriptors that reach other processes,
    e.g. multiprocessing's resource tracker. Descriptors are redirected, not closed, so no number gets a new meaning.
    multiprocessing still finds its tracker's descriptor and starts no second tracker.

    If the main module has started CUDA on import, CUDA's own descriptors stay open.

    Args:
        kept: an open ``multiprocessing.connection.Connection``; its descriptor stays as it is.
    """
    links = dict[int, str]()  # descriptor -> target of its link; "" if the system does not say (no /proc)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
            os.fstat(int(name))
            links[int(name)] = os.readlink(f"{folder}/{name}") if folder.startswith("/proc") else ""
    cuda = any(link.startswith(_CUDA_FILES) for link in links.values())
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, link in links.items():
        if descriptor <= 2 or descriptor == kept.fileno():
            continue
        its_own = not os.get_inheritable(descriptor) and link.startswith(_NAMELESS)
        if cuda and (its_own or link.startswith(_CUDA_FILES)):
            continue
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def end_with_parent(parent: int) -> None:
    """Tie this process to its parent: ignore Ctrl-C, and exit with code 1 within about 0.5 s after the parent ends.

    It returns at once; a daemon thread watches. Call it on the main thread.

    Args:
        parent: process id of the parent. Any other id than ``os.getppid()`` ends this process at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held since the start of a LoneProcess
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def end_children() -> None:
    """Send SIGKILL to every child of this process, and to the whole session of a child that leads one.

    It is for a process that is about to exit while another of its threads waits for a child. Where /proc does not list
    children, nothing happens.
    """
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            for pid in map(int, listed.read_text().split()):
                with contextlib.suppress(ProcessLookupError):  # a child that has just ended
                    leads = os.getsid(pid) == pid
                    (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


def _live(connection: Connection, target: Callable[..., None], args: tuple[Any, ...], parent: int) -> None:
    """Entry point of the child: tie it to its parent, then run the target."""
    end_with_parent(parent)
    target(connection, *args)


def _follow(parent: int) -> None:
    """Exit with code 1 when the parent is gone, even if the main thread is stuck in a call.

    All signals are blocked on this thread: it starts before a jail may be entered, so no handler may run on it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
