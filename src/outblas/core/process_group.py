"""Run a program and answer an interrupt: end all that it started, or pass the interrupt on and let it end by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from types import FrameType
from typing import NamedTuple

#: Seconds in which further interrupts count as the same one. A terminal sends it to each process of its group, and a
#: parent passes it on.
ONE_INTERRUPT_S = 1.0


class Ended(NamedTuple):
    """The end of a program.

    Attributes:
        status: its exit status; -N after signal N.
    """

    status: int
    interrupted: bool


def run_group(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """Run a program without input, wait for it, and return its exit status and output.

    Args:
        timeout_s: seconds after which it is ended; None: no limit.
        stderr: where its errors go, as for subprocess.Popen.

    Raises:
        subprocess.TimeoutExpired: it took longer. The program and its children are gone then.
        OSError: it cannot be started.
    """
    process = None
    try:
        with _held_back():  # an interrupt within Popen would leave the program running
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:  # Ctrl-C, too: it does not reach another session
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_to_end(command: Sequence[str], counts_repeats: bool) -> Ended:
    """Run a program with this process's streams, and wait until it has ended, also after an interrupt (SIGINT).

    The interrupt is passed on, as is SIGTERM where it counts as one. Then the program takes the time that it needs.
    ``subprocess.run`` would kill it after a quarter of a second. A terminal interrupts both by itself. Outside of the
    main thread, interrupts are the main thread's.

    Args:
        counts_repeats: whether a second interrupt means more to the program, e.g. to end at once. Then nothing is
            passed on in the foreground of a terminal. Another program (:func:`one_interrupt`) may get it twice there.

    Raises:
        OSError: it cannot be started.
    """
    with subprocess.Popen(command) as process:
        if threading.current_thread() is not threading.main_thread():
            return Ended(process.wait(), interrupted=False)
        told = counts_repeats and _in_foreground()

        def pass_on(number: int) -> None:
            if not (told and number == signal.SIGINT):
                process.send_signal(number)

        with _each_interrupt(pass_on) as seen:
            return Ended(process.wait(), interrupted=bool(seen))


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt once for interrupts that come within a second of each other. For the main thread only."""

    def stop(_number: int) -> None:
        raise KeyboardInterrupt

    with _each_interrupt(stop):
        yield


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Answer signals that have a handler of Python's when the block ends. Outside of the main thread nothing changes.

    Ignored signals stay ignored, since a program that starts in the block inherits that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    def answer() -> None:
        with contextlib.ExitStack() as answers:
            for number in reversed(dict.fromkeys(came)):  # the stack answers the first one first
                answers.callback(signal.raise_signal, number)

    with contextlib.ExitStack() as after:  # does all of it, also if a handler raises in between
        after.callback(answer)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler):
                after.callback(signal.signal, number, handler)
                signal.signal(number, note)
        yield


def _in_foreground() -> bool:
    """Return whether a terminal's Ctrl-C reaches this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _each_interrupt(act: Callable[[int], None]) -> Iterator[list[float]]:
    """Call ``act`` at each interrupt that is no repetition, in place of an exception; yield the times of them.

    It gets the number of the signal: what answers SIGTERM as an interrupt may call this handler with that one's.
    """
    times: list[float] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        now = monotonic()
        if not times or now - times[-1] > ONE_INTERRUPT_S:
            times.append(now)
            act(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield times
    finally:
        signal.signal(signal.SIGINT, before)
