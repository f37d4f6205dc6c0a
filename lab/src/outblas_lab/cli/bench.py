"""``outblas bench``: a whole suite on one or more GPUs, to a result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import out
from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.runtime.device import require_gpus


def bench(
    suite: common.SuiteOption = "grid1000",
    layout: Annotated[str, typer.Option(help="Layout: tn, nn, or both (timed as separate problems).")] = "tn",
    dtype: common.DtypeOption = "fp16",
    acc: common.AccOption = "fp32",
    mode: Annotated[
        str,
        typer.Option(
            help="Timing mode: offline, offline_cold (L2 evicted before every call), block (each kernel alone at its "
            "settled clock; problems of at least 1e11 FLOP) or server."
        ),
    ] = "offline",
    target_qps: common.QpsOption = None,
    sample: common.SampleOption = None,
    seed: common.SampleSeedOption = 0,
    library: common.LibraryOption = None,
    rounds: Annotated[int, typer.Option(help="Number of interleaved rounds per problem, at least 7.")] = 9,
    gpus: Annotated[str, typer.Option(help="Comma-separated CUDA indices of the GPUs to use.")] = "0",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Result file to write (default: in results, named after the settings).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Resume an interrupted run with the same settings; refuse to replace results of other problems. "
            "--no-resume starts over and replaces the file."
        ),
    ] = True,
) -> None:
    """Time the library against all baselines on a suite, and write a Parquet file (needs a GPU; resumable)."""
    layouts = ("TN", "NN") if layout.lower() == "both" else (layout.upper(),)
    problems = common.suite_problems(suite, layouts, dtype, acc, sample, seed)
    if common.check_mode(mode, target_qps) == "block":
        problems = _large(problems)
    common.at_least("--rounds", rounds, 7)
    if library is not None and not library.is_file():
        wrong = f"--library {library} is not a file"
        raise UsageError(wrong, "a library from `outblas tune`", "correct --library or omit it")
    part = () if sample is None else (f"sample{sample}",)
    name = "_".join((suite, layout.lower(), dtype.lower(), acc.lower(), mode, *part))
    path = out_file or Path("results") / f"{name}.parquet"
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder", "a file path", "pass a file in that folder")
    if resume and path.exists():
        _check_replaced(path, problems, mode)
    indices = require_gpus(common.integers("--gpus", gpus))

    from outblas_lab.pool.run_bench import BenchRequest, run_bench

    request = BenchRequest(problems, suite, library, path, indices, mode, rounds, resume, target_qps)
    with common.progress_bar(f"bench {suite}") as progress:
        run_bench(request, progress)

    from outblas_lab.cli.results import summary_table
    from outblas_lab.publish.summary import summarise

    rows = summarise(path)
    common.print_table(summary_table(rows))
    out.print(f"result:  {path}\nshow it: outblas report {path}", markup=False)
    common.print_result("bench", {"result": path}, rows)


def _large(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of mode ``block``.

    Raises:
        UsageError: none is large enough.
    """
    from outblas.core.suites import BLOCK_FLOP, block_problems

    if found := block_problems(problems):
        return found
    wrong = f"none of the {len(problems)} problems has {BLOCK_FLOP:.0e} FLOP or more"
    do = "pass --mode offline, or a suite with larger problems"
    raise UsageError(wrong, "problems large enough to reach the power limit", do)


def _check_replaced(path: Path, problems: Sequence[Problem], mode: str) -> None:
    """Raise unless ``path`` is a bench of the same problems in the same mode, which a new one may replace."""
    from outblas.records.results import read_result

    do = "pass another --out, or pass --no-resume to replace the file"
    try:
        rows = read_result(path).rows
    except RecordError as error:
        wrong = f"{path} exists, but no bench can be read from it"
        raise UsageError(wrong, "a new file, or a bench of the same problems", do) from error
    was = {Problem.from_json(row) for row in rows}
    if rows[0]["mode"] != mode or was != set(problems):
        wrong = f"{path} is a bench in mode {rows[0]['mode']} of {len(was)} problems"
        raise UsageError(wrong, f"a new file, or a bench in mode {mode} of the same {len(problems)} problems", do)
