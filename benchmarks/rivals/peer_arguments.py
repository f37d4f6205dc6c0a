"""Arguments that the benchmarks against other projects' kernels share: compile anywhere, measure on a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path


def peer_parser(text: str, carried: str, out: str, count: int) -> argparse.ArgumentParser:
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
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--jobs", type=int, default=1, help="compilers at the same time")
    parser.add_argument("--patience", type=float, help="seconds that a compilation may take, on a busy machine")
    parser.add_argument("--cutlass", help="CUTLASS' version, where it was compiled elsewhere")
    return parser
