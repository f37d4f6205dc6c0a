"""``outblas tune``: the main job, from problems to a library and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LayoutOption, SampleOption, SuiteOption, err, out
from outblas.device import parse_device
from outblas.errors import UsageError
from outblas.problem import Problem


def tune(
    suite: SuiteOption = "grid1000",
    mnk: Annotated[list[str] | None, typer.Option(help="Tune M_N_K instead of a suite; may be repeated.")] = None,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    agent: Annotated[str, typer.Option(help="Search agent; see `outblas list agents`.")] = "heuristic",
    budget: Annotated[int, typer.Option(help="Candidates measured per problem, at most.")] = 16,
    device: Annotated[
        str | None,
        typer.Option(help="cuda:N or replay:NAME; by default cuda:0 where there is a GPU, else replay:h200."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory, resumed if it exists; by default named after the settings.")
    ] = None,
    sample: SampleOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the agent, and of --sample.")] = 0,
) -> None:
    """Search for the fastest proven kernel of every problem; write a library, a result file and a report."""
    if mnk and sample is not None:
        raise UsageError("--sample with --mnk", "one of them", "leave one out")
    if mnk:
        suite, problems = "custom", [Problem.from_mnk(one, layout, dtype, acc) for one in dict.fromkeys(mnk)]
    else:
        problems = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    common.at_least("--budget", budget, 1)
    where = parse_device(device)
    place = str(where).replace(":", "-").replace("/", "-")
    path = run or Path("runs") / "-".join(
        (suite, *(() if sample is None else (f"sample{sample}",)), layout.lower(), dtype.lower(), acc.lower(), agent)
        + (str(budget), place)
    )

    from outblas.tune_run import run_tune

    with common.progress_bar("tune") as progress:

        def first(done: int, total: int, note: object = "") -> None:
            if done == 1:  # said only once there is something to wait for: an error stands alone
                what = f"tuning {len(problems)} problems of {suite} on {where}, agent {agent}, budget {budget}"
                err.print(what, markup=False)
            progress(done, total, note)

        library, files = run_tune(problems, suite, agent, budget, seed, where, path, common.command_line(), first)
    for launch in library.launches:
        title = {"plain": "without PDL", "pdl": "PDL allowed", "weights": "constant weights"}[launch]
        fallbacks = f"{library.fallbacks(launch)} of {len(library.rows)} fall back to the baseline"
        out.print(f"{title:<16} geometric mean {library.geomean(launch):.3f}x, {fallbacks}", markup=False)
    out.print(f"library: {files.library}\nresult:  {files.result}\nreport:  {files.report}", markup=False)
