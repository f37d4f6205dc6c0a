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
from typing import Any

JOIN_TIMEOUT_S = 5.0


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
        """Of a process whose pipe broke; negative: the signal that ended it."""
        self._process.join(JOIN_TIMEOUT_S)
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
            self._process.join(JOIN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(JOIN_TIMEOUT_S)
        if not self._process.is_alive():
            self._process.close()


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
