"""``outblas tune``: the main job, from problems to a library and a report; the problems of a program, to the user's
library."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LayoutOption, SampleOption, SuiteOption, err, out
from outblas.device import Device, parse_device
from outblas.errors import UsageError
from outblas.problem import Problem

if TYPE_CHECKING:
    from outblas.library import Library
    from outblas.shares import Share
    from outblas.tune_run import RunFiles
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
    budget: Annotated[
        str,
        typer.Option(
            help="Candidates measured per problem at most (16); a time for all, e.g. 60s; or both, 32,60s. "
            "With --captured the count is an average, dealt out by share of time."
        ),
    ] = "16",
    captured: Annotated[
        Path | None, typer.Option(help="Tune the problems of a file of `outblas capture`, by their share of its time.")
    ] = None,
    install: Annotated[
        bool | None,
        typer.Option(
            "--install/--no-install",
            help="Merge the winners into your library, which outblas.matmul prefers; by default with --captured.",
        ),
    ] = None,
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
    if captured is not None and (mnk or sample is not None):
        raise UsageError("--captured with --mnk or --sample", "one of them", "leave one out")
    if captured is not None:
        suite, problems = "captured", []
    elif mnk:
        suite, problems = "custom", [Problem.from_mnk(one, layout, dtype, acc) for one in dict.fromkeys(mnk)]
    else:
        problems = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    count, seconds = parse_budget(budget)
    plan = _plan(workers, device, gpus, worker_count, ray_address)
    where = parse_device(device) if plan is None else plan.device
    if install and where.recording is not None:
        raise UsageError(
            f"--install with figures of the recording {where}",
            "figures measured on this machine",
            "leave --install out, or tune with --device cuda:0",
        )
    ranked = [] if captured is None else _ranked(captured, where)
    problems = [one.problem for one in ranked] or problems
    if agent is None:  # who wins where agents were compared; on a GPU the policy has not been compared yet
        agent = "heuristic" if where.recording is None else "ppo"
    place = str(plan or where).replace(":", "-").replace("/", "-")
    kind = (*(() if sample is None else (f"sample{sample}",)), layout.lower(), dtype.lower(), acc.lower())
    if captured is not None:
        kind = (_hash(problems),)
    elif mnk:
        kind = (problems[0].mnk if len(problems) == 1 else _hash(problems), *kind)
    seeded = () if seed == 0 else (f"seed{seed}",)
    path = run or Path("runs") / "-".join((suite, *kind, agent, *seeded, budget.replace(",", "-"), place))

    from outblas.shares import budgets as dealt_out
    from outblas.tune_run import run_tune

    with common.progress_bar("tune") as progress:

        def first(done: int, total: int, note: object = "") -> None:
            if done == 1:  # said only once there is something to wait for: an error stands alone
                what = f"tuning {len(problems)} problems of {suite} on {plan or where}, agent {agent}, budget {budget}"
                err.print(what, markup=False)
            progress(done, total, note)

        library, files = run_tune(
            problems, suite, agent, count, seed, where, path, common.command_line(), first, plan,
            budgets=dealt_out(ranked, count) if ranked else None,
            seconds=seconds,
        )  # fmt: skip
    _tell(library, files, len(problems), ranked)
    if install or (install is None and captured is not None):
        _install(library, files, where)


def _hash(problems: list[Problem]) -> str:
    """Eight hex digits for a list of problems, in a folder's name."""
    return hashlib.sha256("".join(p.key for p in problems).encode()).hexdigest()[:8]


def parse_budget(text: str) -> tuple[int, float | None]:
    """(measurements per problem, seconds in all or None) of ``16``, ``60s`` or ``32,60s``.

    Raises:
        UsageError: anything else, or a number below 1.
    """
    match = re.fullmatch(r"(?:(-?\d{1,9})(?:,(?=.)|$))?(?:(\d{1,9}(?:\.\d+)?)s)?", text.strip())
    if match is None or not (match[1] or match[2]):
        do = "e.g. --budget 16, --budget 60s or --budget 32,60s"
        raise UsageError(f"--budget {text!r}", "measurements per problem, seconds in all, or both", do)
    count = common.at_least("--budget", int(match[1] or 16), 1)
    return count, None if match[2] is None else common.positive("--budget", float(match[2]))


def _ranked(file: Path, where: Device) -> list[Share]:
    """The problems of a captured file, those that take most of its time first; says what is left out."""
    from outblas.captured import Captured
    from outblas.device import gpu_of_device
    from outblas.recording import Recording
    from outblas.roofline import H200
    from outblas.shares import predicted_us, shares

    captured = Captured.load(file)
    counts, left_out = captured.problems(), captured.not_served()
    if where.recording is None:
        gpu = H200 if where.gpu_index is None else gpu_of_device(where.gpu_index)
        found = shares(counts, lambda problem: predicted_us(problem, gpu))
    else:
        recording = Recording.load(where.recording)
        known = set(recording.problems)
        left_out |= {f"not in {where}": sum(n for p, n in counts.items() if p not in known)}
        recorded = {p: n for p, n in counts.items() if p in known}
        found = shares(recorded, lambda problem: recording.best_baseline(problem)[1])
    words = "; ".join(f"{n} products left out: {why}" for why, n in left_out.items() if n)
    if not found:
        raise UsageError(f"{file} has nothing to tune{' (' + words + ')' if words else ''}",
                         "products that a library holds", "capture a program with half-precision products")  # fmt: skip
    if words:
        err.print(words, markup=False)
    for one in found[:10]:
        err.print(f"{one.share:6.1%} of the time: {one.problem.key}, {one.count} times {one.us:.1f} us", markup=False)
    return found


def _tell(library: Library, files: RunFiles, asked: int, ranked: list[Share]) -> None:
    from outblas.shares import weighted_speedup

    if len(library.rows) < asked:
        err.print(f"the time is up: {len(library.rows)} of {asked} problems were reached", markup=False)
    for launch in library.launches:
        title = {"plain": "without PDL", "pdl": "PDL allowed", "weights": "constant weights"}[launch]
        fallbacks = f"{library.fallbacks(launch)} of {len(library.rows)} fall back to the baseline"
        weighted = f", all products together {weighted_speedup(ranked, library, launch):.3f}x" if ranked else ""
        out.print(f"{title:<16} geometric mean {library.geomean(launch):.3f}x, {fallbacks}{weighted}", markup=False)
    out.print(f"library: {files.library}\nresult:  {files.result}\nreport:  {files.report}", markup=False)


def _install(library: Library, files: RunFiles, where: Device) -> None:
    """Into the user's library; figures of a recording are not, which is said."""
    if where.recording is not None:
        how = f"outblas.use_library({str(files.library)!r})"
        out.print(f"not installed: the figures are of the recording {where}, not of this machine; {how}", markup=False)
        return
    from outblas.tune_run import provenance_of
    from outblas.user_library import install

    done = install(library, provenance_of(files.path))
    aside = f"; what was there is of another machine or release, now {done.aside}" if done.aside else ""
    out.print(f"installed: {done.path} ({done.rows} problems, {done.changed} new or better{aside})", markup=False)


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
