"""The table of commands that make the published tables again, with the GPU minutes that they took."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outblas.core.suites import SUITES, Table
from outblas.records.averages import problem_of
from outblas.records.library import Library
from outblas.records.results import Result


def again_table(results: Sequence[Result], gpu: str) -> str:
    """Return Markdown: the common command, then a table of file, further options and GPU minutes.

    Minutes are those of the GPU, all starts together. A dash stands for a file that was made before they were kept.

    Args:
        results: the published bench files of a GPU, in the order of the rows.
        gpu: short name of the GPU, that of the folder of the files.
    """
    lines = [
        f"`BUILD` stands for `{build_command(gpu)}`.",
        "",
        "| file | command | GPU minutes |",
        "| --- | --- | ---: |",
    ]
    for result in results:
        seconds = result.provenance.get("gpu_seconds")
        minutes = "–" if seconds is None else f"{seconds / 60:.1f}"
        lines.append(f"| {result.path.stem} | `{command_of_file(result)}` | {minutes} |")
    return "\n".join(lines)


def build_command(gpu: str) -> str:
    """Return the start of the commands for the tables that `outblas build-library` makes.

    Args:
        gpu: short name of the GPU. If it has a packaged library, the build begins with that.
    """
    command = f"outblas build-library --work build/{gpu}"
    packaged = Library.packaged(gpu, missing_ok=True).rows
    return f"{command} --begin-with src/outblas/data/libraries/{gpu}.json" if packaged else command


def command_of_file(result: Result) -> str:
    """Return the command that makes a bench file again, ``BUILD`` standing for the start of a build's command.

    Example: ``BUILD --tables grid1000:TN:fp16:fp32 --steps bench --modes server``, or ``--steps judge,merge`` for a
    file of three starts. A suite that no build makes has ``python benchmarks/SCRIPT.py --out FILE``.
    """
    if result.suite not in SUITES:  # a script of benchmarks/ made it
        return f"python benchmarks/{_script(result)} --out {result.path.as_posix()}"
    row = result.rows[0]
    table = Table(result.suite, row["layout"], row["dtype"], row["acc"])
    judged = all(each.get("by_start") for each in result.rows)
    steps = "judge,merge" if judged else f"bench --modes {row['mode']}"
    return f"BUILD --tables {table} --steps {steps}"


def _script(result: Result) -> str:
    """Return the script of ``benchmarks/`` that makes a file of no build, with its options but ``--out``."""
    if result.suite != "drawn":
        return f"{result.suite}.py"
    row, count = result.rows[0], len({problem_of(row) for row in result.rows})
    seed = re.search(r"seed (\d+)", str(result.meta.get("shapes")))
    drawn = f"--count {count}{f' --seed {seed[1]}' if seed else ''} --layout {row['layout']} --dtype {row['dtype']}"
    return f"{'learning' if row['mode'] == 'learned' else 'new_shapes'}.py --drawn {drawn}"
