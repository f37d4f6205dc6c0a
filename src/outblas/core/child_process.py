"""A spawned process behind a pipe: started without waiting, says hello, ends with its parent, leaves no zombie."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

JOIN_TIMEOUT_S = 5.0
#: Seconds between two looks at a process that has closed the pipe whose end tells of its own.
_LOOK_S = 0.02
#: Where links of CUDA's descriptors lead: its devices, and what has no name.
_CUDA_FILES, _NAMELESS = "/dev/nvidia", ("anon_inode:", "pipe:", "socket:")


class ChildProcess:
    """One process running ``target(connection, *args)``; it should return when its pipe is closed.

    Args:
        daemon: False for a process that has children of its own, which multiprocessing forbids to daemons.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, target, args, os.getpid()), daemon=daemon)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        """Return the exit code of a process whose pipe broke; negative: the signal that ended it. None: it lives on."""
        self._wait()
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process, which breaks its pipe; :meth:`end` is still due."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._process.kill()

    def end(self, kill: bool) -> None:
        """Close the pipe, and wait for the process or kill it."""
        with contextlib.suppress(OSError):
            self.connection.close()  # a process that listens ends by itself
        if not kill:
            self._wait()
        if self._process.is_alive():
            self._process.kill()
            self._wait()
        if not self._process.is_alive():
            self._process.close()

    def _wait(self) -> None:
        """Wait for the end, at most JOIN_TIMEOUT_S. ``join`` would wait without limit for a process that has closed its
        descriptors and lives on, which one that is not trusted can do."""
        end = time.monotonic() + JOIN_TIMEOUT_S
        wait_for([self._process.sentinel], JOIN_TIMEOUT_S)
        while self._process.is_alive() and time.monotonic() < end:
            time.sleep(_LOOK_S)


def close_inherited(kept: Connection) -> None:
    """Lead every descriptor of this process nowhere, but the standard ones and ``kept``.

    For a process that will run strangers' code, at its very beginning: those that ``spawn`` has passed on reach its
    parent's other processes, multiprocessing's resource tracker among them. They become the null device. So no number
    changes its meaning, and multiprocessing, which finds its tracker still there, starts no other.

    A program whose main module starts CUDA when it is imported has it up by now: what CUDA has open stays.
    """
    links = _open_descriptors()
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


def _open_descriptors() -> dict[int, str]:
    """The descriptors of this process, and what they lead to; ``""`` where the system does not tell."""
    found = dict[int, str]()
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the one that listed the folder is closed by now
            os.fstat(int(name))
            found[int(name)] = os.readlink(f"{folder}/{name}") if folder.startswith("/proc") else ""
    return found


def end_with_parent(parent: int) -> None:
    """Make this process the driver's: Ctrl-C is for the driver to handle, and its end is this one's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _live(connection: Connection, target: Callable[..., None], args: tuple[Any, ...], parent: int) -> None:
    end_with_parent(parent)
    target(connection, *args)


def _follow(parent: int) -> None:
    """End with the driver, even when it was killed and this process is stuck in a call. No signal is handled on this
    thread, which a jail entered later may not hold."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
