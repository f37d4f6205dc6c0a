"""Split the command line of a Python program into its interpreter, the interpreter's options and the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from outblas.core.errors import UsageError
from outblas.core.install_hint import install_hint

#: Options of the interpreter that take the next word as their value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NEEDS = "import importlib.util as u, sys; sys.exit(any(u.find_spec(x) is None for x in ('outblas', 'torch')))"


def python_command(program: list[str]) -> tuple[str, list[str], list[str]]:
    """Split a command that runs a Python program.

    Example: ``["python", "-O", "serve.py", "--port", "1"]`` gives ``("/usr/bin/python", ["-O"], ["serve.py", "--port",
    "1"])``.
    A console script gives the interpreter of its first line, ``[]``, and the script's path with its arguments.

    Args:
        program: the words of the command, at least one. The first is looked up on PATH.

    Returns:
        (path of the interpreter, its options, the script or -m or -c and all that follows).

    Raises:
        UsageError: there is no such command or script, it runs no Python, or Python without a program.
    """
    found = shutil.which(program[0])
    if found is None:
        raise UsageError(f"command {program[0]!r} was not found", "a Python program", "pass e.g. -- python serve.py")
    if not os.path.basename(found).startswith("python"):
        return _interpreter_of(found), [], [found, *program[1:]]
    options: list[str] = []
    rest = program[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        taken = 2 if rest[0] in _WITH_VALUE else 1
        options, rest = options + rest[:taken], rest[taken:]
    if not rest or rest[0] == "-" or (rest[0] in ("-m", "-c") and len(rest) < 2):
        wrong = f"{' '.join(program)!r} does not name a program"
        raise UsageError(wrong, "a script, -m MODULE or -c CODE", "add one of them")
    if rest[0] not in ("-m", "-c") and not os.path.exists(rest[0]):
        raise UsageError(f"file {rest[0]!r} does not exist", "a Python program", "correct the path")
    return found, options, rest


def _interpreter_of(script: str) -> str:
    """Return the Python that a script's first line names.

    Raises:
        UsageError: the line names no Python.
    """
    with open(script, "rb") as file:
        first = file.readline(300)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = words[1:]
    python = shutil.which(words[0]) if words and os.path.basename(words[0]).startswith("python") else None
    if python is None:
        wrong = f"{script} is not a Python program"
        raise UsageError(wrong, "python SCRIPT, or a Python console script", "pass e.g. -- python serve.py")
    return python


def check_interpreter(python: str) -> None:
    """Raise UsageError unless an interpreter has both outblas and torch. Nothing is imported."""
    if os.path.realpath(python) == os.path.realpath(sys.executable) and python == sys.executable:
        return
    if subprocess.run([python, "-c", _NEEDS], capture_output=True).returncode:
        wrong = f"{python} lacks outblas or torch"
        raise UsageError(wrong, "an interpreter with both packages", install_hint("gpu", pip=f"{python} -m pip"))
