"""Let SIGTERM and SIGHUP end a program as Ctrl-C does: with its clean-up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

#: Signals by which schedulers, ``timeout``, ``kill`` and a closed terminal end a program.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP within the ``with`` block into Ctrl-C; then end this process by the same signal.

    By default they end a process at once. Its programs in another session go on then, and its temporary folders stay.

    A signal with a handler is left alone, and so is one that is ignored (``nohup``). The second signal ends the process
    at once. On another thread than the main one, nothing happens.

    Yields:
        None.
    """
    taken: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _restore(taken)
        answer = signal.getsignal(signal.SIGINT)
        if callable(answer):  # Python's, or that of a loop of asyncio
            answer(number, frame)
        else:
            raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        _restore(taken)
        if received:
            _end_by(received[0])


def _restore(numbers: list[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def _end_by(number: int) -> None:
    """End this process by a signal, so that its parent sees why. Printed text is written out before."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            stream.flush()
    os.kill(os.getpid(), number)
