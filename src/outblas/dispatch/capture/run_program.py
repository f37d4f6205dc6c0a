"""Run a Python program unchanged with the recorder on (:mod:`outblas.dispatch.capture.session`).

``python -m outblas.dispatch.capture.run_program --out FILE [--append] -- SCRIPT | -m MODULE | -c CODE ...``

The program runs in this process and keeps its standard streams, exit status and signals. The record is written when
the interpreter ends: at the end of the script, by ``sys.exit``, an exception or Ctrl-C. It is also written on SIGTERM
and SIGHUP, unless the program handles or ignores them, and every few seconds in case the process is killed. It is
written before ``os._exit`` and before the program replaces itself (``os.execv`` and its like), which ends the
recording. If it cannot be written, the exit status 0 becomes 2.

torch is imported before the program's first line. So set environment variables of torch's import
(``OMP_NUM_THREADS``) before the command, not in the program. CUDA is not initialised, so the program may still set
``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outblas.core.errors import EXIT_ERROR, OutblasError, RecordError
from outblas.core.main_program import end_on_wrong_arguments, run_as_main, split_arguments, wrong_arguments
from outblas.dispatch.capture.session import capture
from outblas.records.captured_products import CapturedProducts

#: That of ``os`` before :func:`_write_before_the_end`.
_EXIT = os._exit
_USAGE = "--out FILE [--append] -- SCRIPT | -m MODULE | -c CODE, with its arguments"


def main(argv: Sequence[str]) -> None:
    """Run the program that ``argv`` names; raise its errors.

    Raises:
        OutblasError: an argument is wrong.
        SystemExit: the recorder cannot begin: torch is not installed, or nothing can be added to the file.
    """
    path, append, program = _arguments(argv)
    outcome = _Outcome()
    atexit.register(_exit_without_record, outcome)  # before all that torch registers, so it is called after it
    recorder = capture(path, append, command=" ".join(["outblas capture", *program]))
    # Stays on as long as the process lives: threads may outlive the script.
    try:
        recorder.__enter__()
    except OutblasError as error:  # the program has not begun, so a traceback would be none of its own
        sys.exit(f"error: {error}")
    # Registered first, so called last: it also sees products of the program's own exit handlers. The path is absolute,
    # as the program may change its folder.
    finish = partial(_finish, recorder, os.path.abspath(path), os.getpid(), outcome)
    atexit.register(finish)
    _write_on_signals(finish)
    _write_before_the_end(finish, outcome)
    try:
        run_as_main(program)
    except SystemExit as error:
        outcome.succeeded = error.code in (None, 0)
        raise
    except BaseException:
        outcome.succeeded = False
        raise


@dataclass
class _Outcome:
    """The end of the process.

    Attributes:
        succeeded: the program's own exit status is 0.
        lost: the record could not be written.
    """

    succeeded: bool = True
    lost: bool = False


def _exit_without_record(outcome: _Outcome) -> None:
    """End with status 2 if the program succeeded and its record is lost. An exit handler can do so in no other way."""
    if outcome.lost and outcome.succeeded:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        _EXIT(EXIT_ERROR)


def _arguments(argv: Sequence[str]) -> tuple[str, bool, list[str]]:
    options, program = split_arguments(argv, _USAGE, "capture")
    rest = [word for word in options if word != "--append"]
    if len(rest) != 2 or rest[0] != "--out":
        raise wrong_arguments(argv, _USAGE, "capture")
    return rest[1], "--append" in options, program


def _finish(recorder: capture, path: str, pid: int, outcome: _Outcome) -> None:
    """Write the record; a program that has multiplied nothing, or failed at once, costs no record that was there."""
    if os.getpid() != pid:
        return  # a forked child, whose record is the parent's
    try:
        if recorder.captured.counts or not _holds_products(path):
            recorder.write()
        else:
            print(f"outblas capture: no half-precision matmul was seen; {path} is unchanged", file=sys.stderr)
    except OutblasError as error:
        outcome.lost = True
        print(f"error: {error}", file=sys.stderr)


def _write_before_the_end(finish: Callable[[], None], outcome: _Outcome) -> None:
    """Let the functions of ``os`` that end the process without exit handlers write the record before.

    A forked child has no record; it ends as it would.
    """
    pid = os.getpid()

    @functools.wraps(_EXIT)
    def exit_now(status: int) -> None:
        if os.getpid() == pid:
            finish()
        _EXIT(EXIT_ERROR if outcome.lost and status == 0 else status)

    def recorded(replace: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(replace)
        def exec_now(path: Any, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() == pid:
                finish()
                print(f"outblas capture: {os.fsdecode(path)} replaces the program and is not recorded", file=sys.stderr)
            return replace(path, *args, **kwargs)

        return exec_now

    os._exit, os.execv, os.execve = exit_now, recorded(os.execv), recorded(os.execve)  # type: ignore[assignment]


def _holds_products(path: str) -> bool:
    """A file that is damaged, or of something else, is the recorder's to replace or to refuse."""
    try:
        return os.path.exists(path) and bool(CapturedProducts.load(Path(path)).counts)
    except RecordError:
        return False


def _write_on_signals(finish: Callable[[], None]) -> None:
    """The default of SIGTERM and SIGHUP ends the process at once; do that, but after the record is written."""

    def ended(number: int, _frame: object) -> None:
        finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, ended)


if __name__ == "__main__":
    end_on_wrong_arguments(_arguments)
    main(sys.argv[1:])
