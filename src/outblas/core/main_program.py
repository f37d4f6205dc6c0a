"""Run a Python program inside this process, as the interpreter would run it."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any

from outblas.core.errors import OutblasError, UsageError


def end_on_wrong_arguments(parse: Callable[[Sequence[str]], object]) -> None:
    """End this process with one line if its own arguments are wrong, before any error of the program it runs.

    Args:
        parse: reads the arguments; raises OutblasError if they are wrong.
    """
    try:
        parse(sys.argv[1:])
    except OutblasError as error:
        sys.exit(f"error: {error}")


def split_arguments(argv: Sequence[str], expected: str, command: str) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and the program after it.

    Raises:
        UsageError: there is no ``--``, or no program after it; also for ``-m`` and ``-c`` without a word after them.
    """
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    options, program = words[:place], words[place + 1 :]
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        raise wrong_arguments(words, expected, command)
    return options, program


def wrong_arguments(argv: Sequence[str], expected: str, command: str) -> UsageError:
    """Return the error for wrong arguments, which are those of :func:`split_arguments`."""
    return UsageError(f"invalid arguments {' '.join(argv)!r}", expected, f"see outblas {command} --help")


def run_as_main(program: list[str]) -> None:
    """Run a program as the interpreter would, with its own ``__main__``, ``sys.argv`` and head of ``sys.path``.

    They are not restored: the program's threads may outlive its last line. Exceptions of the program pass.

    Args:
        program: a script, ``-m`` and a module, or ``-c`` and code, with the program's arguments.
    """
    head, arguments = program[0], program[1:]
    named = head in ("-m", "-c")
    bundle = not named and (os.path.isdir(head) or zipfile.is_zipfile(head))  # of a __main__.py and what it needs
    sys.argv = [head, *arguments[1:]] if named else list(program)
    if not sys.flags.safe_path or bundle:
        first = {"-m": os.getcwd(), "-c": ""}.get(head, os.path.dirname(os.path.realpath(head)))
        sys.path[0:1] = [os.path.abspath(head) if bundle else first]
    scope = vars(_fresh_main())
    if head == "-m" or bundle:
        # The interpreter's own way in; runpy.run_module puts our __main__ back when the program's last line has run.
        runpy._run_module_as_main("__main__" if bundle else arguments[0], alter_argv=not bundle)  # type: ignore[attr-defined]
    elif head == "-c":
        exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), scope)
    else:
        path = os.path.abspath(head)
        loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        scope.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
        exec(_code_of(path), scope)


def _code_of(path: str) -> Any:
    """Of a script, or of a compiled one."""
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _fresh_main() -> Any:
    main_module = type(sys)("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    return main_module
