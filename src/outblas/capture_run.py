"""``python -m outblas.capture_run --out FILE [--append] -- SCRIPT | -m MODULE | -c CODE ...``: a Python program as it
is, with the recorder on (:mod:`outblas.capturing`).

The program runs in this process: its standard streams, exit status and signals are its own. What it ran is written when
the interpreter ends, however that comes about (the end of the script, ``sys.exit``, an exception, Ctrl-C), on SIGTERM
unless the program handles that itself, and every few seconds, for the sake of a process that is killed.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Any

from outblas.capturing import capture
from outblas.errors import OutblasError, UsageError

_USAGE = "--out FILE [--append] -- SCRIPT | -m MODULE | -c CODE, with its arguments"


def main(argv: Sequence[str]) -> None:
    """Raises what the program raises; OutblasError for wrong arguments, and for a file that cannot be added to."""
    path, append, program = _arguments(argv)
    recorder = capture(path, append, command=" ".join(["outblas capture", *program]))
    recorder.__enter__()  # for as long as the process lives: threads may outlive the script
    # Registered first, called last: what the program does at its exit is seen, too.
    atexit.register(_finish, recorder)
    _write_on_sigterm(recorder)
    _run(program)


def _arguments(argv: Sequence[str]) -> tuple[str, bool, list[str]]:
    words = list(argv)
    if "--" in words:
        options, program = words[: words.index("--")], words[words.index("--") + 1 :]
        append = "--append" in options
        rest = [word for word in options if word != "--append"]
        if len(rest) == 2 and rest[0] == "--out" and program and not (program[0] in ("-m", "-c") and len(program) < 2):
            return rest[1], append, program
    raise UsageError(f"arguments {' '.join(words)!r}", _USAGE, "see outblas capture --help")


def _run(program: list[str]) -> None:
    """As the interpreter would: ``__main__``, ``sys.argv`` and the head of ``sys.path`` are the program's."""
    head, safe = program[0], getattr(sys.flags, "safe_path", False)
    if head == "-m":
        sys.argv = ["-m", *program[2:]]
        if not safe:
            sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif head == "-c":
        sys.argv = ["-c", *program[2:]]
        if not safe:
            sys.path[0] = ""
        exec(compile(program[1], "<string>", "exec"), vars(_fresh_main()))
    else:
        sys.argv = list(program)
        if not safe:
            sys.path[0] = os.path.dirname(os.path.realpath(head))
        runpy.run_path(head, run_name="__main__")


def _fresh_main() -> Any:
    main_module = type(sys)("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    return main_module


def _finish(recorder: capture) -> None:
    try:
        recorder.write()
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)


def _write_on_sigterm(recorder: capture) -> None:
    """The default of SIGTERM ends the process at once; do that, but after the record is written."""

    def ended(number: int, _frame: object) -> None:
        _finish(recorder)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, ended)


if __name__ == "__main__":
    try:
        _arguments(sys.argv[1:])
    except OutblasError as error:
        sys.exit(f"error: {error}")
    main(sys.argv[1:])
