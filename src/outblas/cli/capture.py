"""``outblas capture``: run a Python program and record the matrix products that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import JsonOption
from outblas.core.errors import RecordError, UsageError
from outblas.core.install_hint import install_hint

#: Options of the interpreter that take the next word as their value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NEEDS = "import importlib.util as u, sys; sys.exit(any(u.find_spec(x) is None for x in ('outblas', 'torch')))"


def capture(
    program: Annotated[
        list[str], typer.Argument(help="The program, after --: python serve.py ..., or a console script of Python.")
    ],
    out_file: Annotated[Path, typer.Option("--out", help="JSON file to write.")] = Path("problems.json"),
    append: Annotated[
        bool,
        typer.Option("--append", help="Add to the record that is there; else replace it, unless no product was seen."),
    ] = False,
    json_out: JsonOption = False,
) -> None:
    """Run a Python program and record every half-precision matrix product, for `outblas tune --captured`.

    torch is imported before the program's first line: set what torch reads at its import (OMP_NUM_THREADS) outside of
    the program. CUDA is not initialised.
    """
    from outblas.dispatch.capture import run_program

    if out_file.is_dir() or not os.access(common.existing(out_file.parent), os.W_OK):
        raise UsageError(f"--out {out_file}", "a file in a writable folder", "choose another path")
    if out_file.exists():
        _check_captured(out_file, append)
    python, options, words = python_command(program)
    if words[0] not in ("-m", "-c") and not os.path.exists(words[0]):
        raise UsageError(f"no file {words[0]!r}", "a Python program", "correct its path")
    _check_interpreter(python)
    out_file = out_file.resolve()  # the program may change its working directory
    command = [python, *options, "-m", run_program.__name__, "--out", str(out_file)]
    command += [*(["--append"] if append else []), "--", *words]
    sys.stdout.flush()
    sys.stderr.flush()
    if json_out:
        raise typer.Exit(_print_document(subprocess.run(command, check=False).returncode, out_file))
    # In place of this process: streams, signals and exit status are the program's own.
    os.execv(python, command)


def _print_document(exit_code: int, file: Path) -> int:
    """Print the record of a program that has ended, and return the program's exit status."""
    from outblas.cli.documents import CaptureDocument, CapturedProblem, print_document
    from outblas.records.captured_products import CapturedProducts

    seen = CapturedProducts.load(file) if file.is_file() else CapturedProducts({})
    counts = sorted(seen.problems().items(), key=lambda item: -item[1])
    problems = [CapturedProblem(problem=problem.key, count=count) for problem, count in counts]
    print_document(
        CaptureDocument(file=str(file), exit_code=exit_code, problems=problems, not_served=seen.not_served())
    )
    return exit_code


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
        UsageError: there is no such command, it runs no Python, or Python without a program.
    """
    found = shutil.which(program[0])
    if found is None:
        raise UsageError(f"no command {program[0]!r}", "a Python program", "e.g. outblas capture -- python serve.py")
    if not os.path.basename(found).startswith("python"):
        return _interpreter_of(found), [], [found, *program[1:]]
    options: list[str] = []
    rest = program[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        taken = 2 if rest[0] in _WITH_VALUE else 1
        options, rest = options + rest[:taken], rest[taken:]
    if not rest or rest[0] == "-" or (rest[0] in ("-m", "-c") and len(rest) < 2):
        raise UsageError(f"{' '.join(program)!r} names no program", "a script, -m MODULE or -c CODE", "name one")
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
        raise UsageError(
            f"{script} is no Python program",
            "python and a script, or a console script that Python runs",
            "e.g. outblas capture -- python serve.py",
        )
    return python


def _check_interpreter(python: str) -> None:
    if os.path.realpath(python) == os.path.realpath(sys.executable) and python == sys.executable:
        return
    if subprocess.run([python, "-c", _NEEDS], capture_output=True).returncode:
        raise UsageError(
            f"{python} has not both outblas and torch", "an interpreter with both", install_hint(pip=f"{python} -m pip")
        )


def _check_captured(path: Path, append: bool) -> None:
    """A record may be added to or replaced, and so may an empty file; nothing else that is there is written over."""
    from outblas.records.captured_products import CapturedProducts

    wrong, do = f"--out {path} is there and is no record", "choose another path, or move it away"
    expected = "a new file, or one that `outblas capture` wrote"
    if not path.is_file():
        raise UsageError(wrong, expected, do)
    try:
        CapturedProducts.load(path)
    except RecordError as error:
        if append:
            raise
        if path.stat().st_size > 0:
            raise UsageError(wrong, expected, do) from error
