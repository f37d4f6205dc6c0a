"""``outblas capture``: run a Python program and record the matrix products that it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.core.errors import UsageError
from outblas.core.files import try_folder
from outblas.core.process_group import run_to_end
from outblas.core.python_command import check_interpreter, python_command


def capture(
    program: Annotated[
        list[str], typer.Argument(help="Command to run, after --: python serve.py ... or a Python console script.")
    ],
    out_file: Annotated[Path, typer.Option("--out", help="JSON file to write.")] = Path("problems.json"),
    append: Annotated[
        bool,
        typer.Option("--append", help="Add to an existing --out file (default: replace the file if any matmul ran)."),
    ] = False,
) -> None:
    """Run a Python program and record its half-precision matmuls.

    To tune the recorded matmuls, run `outblas tune --captured FILE`. Before you start this command, set any environment
    variables that torch reads on import, such as OMP_NUM_THREADS. This command imports torch before it runs the
    program. The recording itself does not initialize CUDA.
    """
    from outblas.dispatch.capture import run_program

    _check_captured(out_file, append)
    python, options, words = python_command(program)
    check_interpreter(python)
    # Before a long program runs for nothing.
    try:
        try_folder(out_file.parent)
    except OSError as error:
        wrong = f"--out {out_file} cannot be written ({error.strerror or error})"
        raise UsageError(wrong, "a file in a writable folder", "choose another path") from error
    out_file = out_file.resolve()  # the program may change its working directory
    command = [python, *options, "-m", run_program.__name__, "--out", str(out_file)]
    command += [*(["--append"] if append else []), "--", *words]
    sys.stdout.flush()
    sys.stderr.flush()
    if common.wants_json():
        raise typer.Exit(_print_document(run_to_end(command, counts_repeats=True).status, out_file))
    # In place of this process: streams, signals and exit status are the program's own.
    os.execv(python, command)


def _print_document(exit_code: int, file: Path) -> int:
    """Print the record of a program that has ended, and return the program's exit status."""
    from outblas.cli.documents import CaptureDocument, CapturedProblem
    from outblas.records.captured_products import CapturedProducts

    seen = CapturedProducts.load(file) if file.is_file() else CapturedProducts({})
    counts = sorted(seen.problems().items(), key=lambda item: -item[1])
    problems = [CapturedProblem(problem=problem.key, count=count) for problem, count in counts]
    common.print_document(
        CaptureDocument(file=str(file), exit_code=exit_code, problems=problems, not_served=seen.not_served())
    )
    return exit_code


def _check_captured(path: Path, append: bool) -> None:
    """A record may be added to or replaced, and so may an empty file; nothing else that is there is written over."""
    from outblas.records.captured_products import CapturedProducts

    if append and path.is_file():
        CapturedProducts.load(path)
    common.output_file("--out", path, "record of `outblas capture`", CapturedProducts.load)
