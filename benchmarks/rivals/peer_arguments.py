"""Arguments, choice of a step and provenance of the benchmarks against kernels of other projects."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rivals.compile_jobs import cutlass_version, set_patience

from outblas.core.errors import OutblasError
from outblas.records.provenance import collect_provenance, script_command


def peer_parser(text: str, carried: str, out: Path, count: int) -> argparse.ArgumentParser:
    """Return a parser with the shared arguments.

    Args:
        text: the benchmark's docstring.
        carried: default folder of compiled kernels.
        out: default result file.
        count: default number of problems.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("compile", "measure"))
    parser.add_argument("--carried", type=Path, default=Path(carried), help="folder of compiled kernels")
    parser.add_argument("--count", type=int, default=count, help="problems")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--jobs", type=int, default=1, help="compilers at the same time")
    parser.add_argument("--patience", type=float, help="seconds that a compilation may take, on a busy machine")
    parser.add_argument("--cutlass", help="CUTLASS' version, where it was compiled elsewhere")
    return parser


def run_with_checkout(
    parser: argparse.ArgumentParser, given: Sequence[str] | None, measure: Callable[[argparse.Namespace], None],
    compile_all: Callable[[argparse.Namespace], Mapping[str, str]],
) -> None:  # fmt: skip
    """Compile CUDA-L2's kernels from a checkout, or measure. The exit status is 1 if a compiler refused a kernel.

    Args:
        parser: that of :func:`peer_parser`; it gets ``--checkout``.
        given: the command's arguments; None: those of the process.
        measure: step ``measure``.
        compile_all: step ``compile``; returns name -> reason of the kernels that were refused.
    """
    parser.add_argument("--checkout", type=Path, help="folder of CUDA-L2's repository, for compile")
    arguments = parser.parse_args(given)
    set_patience(arguments.patience)
    try:
        if arguments.step == "measure":
            measure(arguments)
            return
        if arguments.checkout is None:
            parser.error("compile needs --checkout, the folder of CUDA-L2's repository")
        refused = compile_all(arguments)
        sys.exit(f"{len(refused)} kernels were refused; their reasons are above" if refused else 0)
    except OutblasError as error:
        sys.exit(str(error))


def peer_provenance(arguments: argparse.Namespace, script: str) -> dict[str, Any]:
    """Return the provenance of a result file, with CUTLASS' version: the one that is given, else the installed one."""
    return {**collect_provenance(script_command(script)), "cutlass": arguments.cutlass or cutlass_version()}
