"""``outblas tune``: the main job, from problems to a library and a report; the problems of a program, to the user's
library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, JsonOption, LayoutOption, SampleOption, SuiteOption, err, out
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.runtime.device import Device, parse_device

if TYPE_CHECKING:
    from outblas.bench.pool.worker_plan import WorkerPlan
    from outblas.records.library import Library
    from outblas.search.time_shares import TimeShare
    from outblas.search.tune_run import RunFiles, TuneRequest

AgentOption = Annotated[
    str | None,
    typer.Option(help="Search agent, see `outblas list agents`; by default regressor on a recording, else heuristic."),
]
BudgetOption = Annotated[
    str,
    typer.Option(
        help="Candidates measured per problem at most (16); a time for all, e.g. 60s; or both, 32,60s. "
        "With --captured the count is an average, dealt out by share of time."
    ),
]
CapturedOption = Annotated[
    Path | None, typer.Option(help="Tune the problems of a file of `outblas capture`, by their share of its time.")
]
InstallOption = Annotated[
    bool | None,
    typer.Option(
        "--install/--no-install",
        help="Merge the winners into your library, which outblas.matmul prefers; by default with --captured.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help=f"cuda:N or replay:NAME; by default cuda:0, or replay:{common.DEFAULT_RECORDING} without a GPU."),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(help="local: a process per GPU; ray: an actor per GPU of a Ray cluster. By default one GPU."),
]


def tune(
    suite: SuiteOption = "grid1000",
    mnk: Annotated[list[str] | None, typer.Option(help="Tune M_N_K instead of a suite; may be repeated.")] = None,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    agent: AgentOption = None,
    budget: BudgetOption = "16",
    captured: CapturedOption = None,
    install: InstallOption = None,
    device: DeviceOption = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory, resumed if it exists; by default named after the settings.")
    ] = None,
    sample: SampleOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the agent, and of --sample.")] = 0,
    workers: WorkersOption = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of --workers local, separated by commas; by default all.")
    ] = None,
    worker_count: Annotated[
        int | None, typer.Option(help="Workers of a replay (by default 2), or of a cluster (by default all its GPUs).")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster: auto (the running one, the default), local, or host:port.")
    ] = None,
    json_out: JsonOption = False,
) -> None:
    """Search for the fastest proven kernel of every problem; write a library, a result file and a report."""
    _check_sources(mnk, captured, sample)
    problems: Sequence[Problem] = []
    if captured is not None:
        suite = "captured"
    elif mnk:
        suite, problems = "custom", [Problem.from_mnk(one, layout, dtype, acc) for one in dict.fromkeys(mnk)]
    else:
        problems = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    count, seconds = parse_budget(budget)
    plan = _plan(workers, device, gpus, worker_count, ray_address)
    where = parse_device(device) if plan is None else plan.device
    _check_install(install, where)
    ranked = [] if captured is None else _ranked(captured, where)

    from outblas.search.time_shares import budgets
    from outblas.search.tune_run import TuneRequest, default_agent, folder_name

    problems = [one.problem for one in ranked] or problems
    agent = default_agent(where) if agent is None else agent
    path = run or Path("runs") / folder_name(suite, problems, agent, seed, budget, str(plan or where), sample)
    dealt_out = budgets(ranked, count) if ranked else None
    request = TuneRequest(
        problems, suite, agent, count, seed, where, path, common.command_line(), plan, dealt_out, seconds
    )
    _run(request, budget, ranked, install or (install is None and captured is not None), json_out)


def _run(request: TuneRequest, budget: str, ranked: Sequence[TimeShare], install: bool, json_out: bool) -> None:
    """Tune, install, report. Whatever keeps a report from being written, the library is installed by then."""
    from outblas.publish.html.tune_page import write_report
    from outblas.search.tune_run import measurements_kept, run_tune

    kept = measurements_kept(request.path)
    with common.progress_bar("tune") as progress:

        def first(done: int, total: int, note: object = "") -> None:
            if done == 1:  # said only once there is something to wait for: an error stands alone
                what = f"{len(request.problems)} problems of {request.suite} on {request.place}"
                err.print(f"tuning {what}, agent {request.agent}, budget {budget}", markup=False)
                if kept:
                    err.print(f"resuming: {kept} measurements of {request.path} are kept", markup=False)
            progress(done, total, note)

        library, files = run_tune(request, first)
    if len(library.rows) < len(request.problems):
        reached = f"{len(library.rows)} of {len(request.problems)} problems were reached"
        err.print(f"the time is up: {reached}", markup=False)
    if not json_out:
        _print_outcome(library, files, ranked)
    installed = _install(library, files, request.device, json_out) if install else None
    write_report(files.path, files.report)
    if json_out:
        _print_document(library, files, ranked, len(request.problems), kept, installed)
    else:
        out.print(f"report:  {files.report}", markup=False)


def _print_document(
    library: Library, files: RunFiles, ranked: Sequence[TimeShare], asked: int, kept: int, installed: Path | None
) -> None:
    from outblas.cli.documents import TunedLaunch, TuneDocument, print_document
    from outblas.search.time_shares import weighted_speedup

    launches = [
        TunedLaunch(
            launch=launch,
            geomean=library.geomean(launch),
            fallbacks=library.fallbacks(launch),
            weighted=weighted_speedup(ranked, library, launch) if ranked else None,
        )
        for launch in library.launches
    ]
    document = TuneDocument(
        asked=asked,
        tuned=len(library.rows),
        kept=kept,
        launches=launches,
        library=str(files.library),
        result=str(files.result),
        report=str(files.report),
        installed=None if installed is None else str(installed),
    )
    print_document(document)


def _check_sources(mnk: list[str] | None, captured: Path | None, sample: int | None) -> None:
    """Raise UsageError where the problems are given in two ways."""
    if mnk and sample is not None:
        raise UsageError("--sample with --mnk", "one of them", "leave one out")
    if captured is not None and (mnk or sample is not None):
        raise UsageError("--captured with --mnk or --sample", "one of them", "leave one out")


def _check_install(install: bool | None, where: Device) -> None:
    """Raise UsageError where --install is passed for figures of a recording."""
    if install and where.recording is not None:
        raise UsageError(
            f"--install with figures of the recording {where}",
            "figures measured on this machine",
            "leave --install out, or tune with --device cuda:0",
        )


def parse_budget(text: str) -> tuple[int, float | None]:
    """Return (measurements per problem, seconds in all or None).

    ``"16"`` gives ``(16, None)``, ``"60s"`` gives ``(16, 60.0)``, and ``"32,60s"`` gives ``(32, 60.0)``.

    Raises:
        UsageError: another form, less than 1 measurement, or 0 seconds.
    """
    match = re.fullmatch(r"(?:(-?\d{1,9})(?:,(?=.)|$))?(?:(\d{1,9}(?:\.\d+)?)s)?", text.strip())
    if match is None or not (match[1] or match[2]):
        do = "e.g. --budget 16, --budget 60s or --budget 32,60s"
        raise UsageError(f"--budget {text!r}", "measurements per problem, seconds in all, or both", do)
    count = common.at_least("--budget", int(match[1] or 16), 1)
    return count, None if match[2] is None else common.positive("--budget", float(match[2]))


def _ranked(file: Path, where: Device) -> list[TimeShare]:
    """The problems of a captured file, those that take most of its time first; says what is left out."""
    from outblas.search.time_shares import captured_time_shares

    found, left_out = captured_time_shares(file, where)
    if left_out:
        err.print(left_out, markup=False)
    for one in found[:10]:
        err.print(f"{one.share:6.1%} of the time: {one.problem.key}, {one.count} times {one.us:.1f} us", markup=False)
    return found


def _print_outcome(library: Library, files: RunFiles, ranked: Sequence[TimeShare]) -> None:
    from outblas.search.time_shares import weighted_speedup

    for launch in library.launches:
        title = {"plain": "without PDL", "pdl": "PDL allowed", "weights": "constant weights"}[launch]
        fallbacks = f"{library.fallbacks(launch)} of {len(library.rows)} fall back to the baseline"
        weighted = f", all products together {weighted_speedup(ranked, library, launch):.3f}x" if ranked else ""
        out.print(f"{title:<16} geometric mean {library.geomean(launch):.3f}x, {fallbacks}{weighted}", markup=False)
    out.print(f"library: {files.library}\nresult:  {files.result}", markup=False)


def _install(library: Library, files: RunFiles, where: Device, json_out: bool) -> Path | None:
    """Merge a library into the user's; return its path, or None for figures of a recording, which are not installed."""
    say = err if json_out else out
    if where.recording is not None:
        how = f"outblas.use_library({str(files.library)!r})"
        say.print(f"not installed: the figures are of the recording {where}, not of this machine; {how}", markup=False)
        return None
    from outblas.records.user_library import install
    from outblas.search.tune_run import provenance_of

    done = install(library, provenance_of(files.path))
    aside = f"; the library of another machine or release that was there is now {done.aside}" if done.aside else ""
    say.print(f"installed: {done.path} ({done.rows} problems, {done.changed} new or better{aside})", markup=False)
    return done.path


def _plan(
    workers: str | None, device: str | None, gpus: str | None, count: int | None, ray_address: str | None
) -> WorkerPlan | None:
    """Return the requested workers; None means the single worker of the device."""
    if workers is None:
        for option, value in (("--gpus", gpus), ("--worker-count", count), ("--ray-address", ray_address)):
            if value is not None:
                raise UsageError(f"{option} without --workers", "--workers local or ray with it", "add --workers")
        return None
    from outblas.bench.pool.worker_plan import make_plan

    indices = None if gpus is None else common.parse_indices("--gpus", gpus)
    return make_plan(workers, device, indices, count, ray_address)
