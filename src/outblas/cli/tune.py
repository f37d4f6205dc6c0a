"""``outblas tune``: the main job, from problems to a library and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LayoutOption, SampleOption, SuiteOption, err, out
from outblas.device import parse_device
from outblas.errors import UsageError
from outblas.problem import Problem

if TYPE_CHECKING:
    from outblas.workers import WorkerPlan


def tune(
    suite: SuiteOption = "grid1000",
    mnk: Annotated[list[str] | None, typer.Option(help="Tune M_N_K instead of a suite; may be repeated.")] = None,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    agent: Annotated[
        str | None,
        typer.Option(help="Search agent, see `outblas list agents`; by default ppo on a recording, else heuristic."),
    ] = None,
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
    workers: Annotated[
        str | None,
        typer.Option(help="local: a process per GPU; ray: an actor per GPU of a Ray cluster. By default one GPU."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of --workers local, separated by commas; by default all.")
    ] = None,
    worker_count: Annotated[
        int | None, typer.Option(help="Workers of a replay (by default 2), or of a cluster (by default all its GPUs).")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster: auto (the running one, the default), local, or host:port.")
    ] = None,
) -> None:
    """Search for the fastest proven kernel of every problem; write a library, a result file and a report."""
    if mnk and sample is not None:
        raise UsageError("--sample with --mnk", "one of them", "leave one out")
    if mnk:
        suite, problems = "custom", [Problem.from_mnk(one, layout, dtype, acc) for one in dict.fromkeys(mnk)]
    else:
        problems = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    common.at_least("--budget", budget, 1)
    plan = _plan(workers, device, gpus, worker_count, ray_address)
    where = parse_device(device) if plan is None else plan.device
    if agent is None:  # who wins where agents were compared; on a GPU the policy has not been compared yet
        agent = "heuristic" if where.recording is None else "ppo"
    place = str(plan or where).replace(":", "-").replace("/", "-")
    path = run or Path("runs") / "-".join(
        (suite, *(() if sample is None else (f"sample{sample}",)), layout.lower(), dtype.lower(), acc.lower(), agent)
        + (str(budget), place)
    )

    from outblas.tune_run import run_tune

    with common.progress_bar("tune") as progress:

        def first(done: int, total: int, note: object = "") -> None:
            if done == 1:  # said only once there is something to wait for: an error stands alone
                what = f"tuning {len(problems)} problems of {suite} on {plan or where}, agent {agent}, budget {budget}"
                err.print(what, markup=False)
            progress(done, total, note)

        library, files = run_tune(problems, suite, agent, budget, seed, where, path, common.command_line(), first, plan)
    for launch in library.launches:
        title = {"plain": "without PDL", "pdl": "PDL allowed", "weights": "constant weights"}[launch]
        fallbacks = f"{library.fallbacks(launch)} of {len(library.rows)} fall back to the baseline"
        out.print(f"{title:<16} geometric mean {library.geomean(launch):.3f}x, {fallbacks}", markup=False)
    out.print(f"library: {files.library}\nresult:  {files.result}\nreport:  {files.report}", markup=False)


def _plan(
    workers: str | None, device: str | None, gpus: str | None, count: int | None, ray_address: str | None
) -> WorkerPlan | None:
    """The workers asked for; None: the one of the device."""
    if workers is None:
        for option, value in (("--gpus", gpus), ("--worker-count", count), ("--ray-address", ray_address)):
            if value is not None:
                raise UsageError(f"{option} without --workers", "--workers local or ray with it", "add --workers")
        return None
    from outblas.workers import make_plan

    indices = None if gpus is None else common.parse_indices("--gpus", gpus)
    return make_plan(workers, device, indices, count, ray_address)
