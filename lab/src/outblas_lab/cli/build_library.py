"""``outblas build-library``: recording, library and published results of all tables, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import EXIT_INTERRUPT, MODES, err, out
from outblas.core.errors import UsageError

if TYPE_CHECKING:
    from outblas.core.suites import Table
    from outblas_lab.build.build_work import BuildFolder

WorkOption = Annotated[
    Path | None, typer.Option(help="Directory of everything that is made; the same command goes on where it stopped.")
]
CheckOption = Annotated[
    Path | None, typer.Option(help="Only verify a file of `outblas contribute`; needs no GPU and no --work.")
]
GpusOption = Annotated[
    str,
    typer.Option(
        help="CUDA indices of the GPUs, separated by commas. They share trials and benches; the first searches."
    ),
]
TablesOption = Annotated[
    str | None, typer.Option(help="Tables as SUITE:LAYOUT:DTYPE:ACC, separated by commas; by default all published.")
]
StepsOption = Annotated[
    str | None, typer.Option(help="Steps, separated by commas; by default all but those that run only when named.")
]
ModesOption = Annotated[
    str | None,
    typer.Option(
        help="Modes of step bench, separated by commas; by default all: "
        + ", ".join(MODES)
        + ". Step trial_workloads takes offline_cold and server of them."
    ),
]
ExtraOption = Annotated[
    str | None,
    typer.Option(
        help="Tables that are benched in the modes beside offline, too, and have second winners; by default the first."
    ),
]
StartsOption = Annotated[
    str | None,
    typer.Option(
        help="Starts of the machine that steps trial, judge and judge_cold make now: some of 1 to 9 and block; by "
        "default 1, 2, 3, block. Step trial alone has 4 to 9, and judge_cold 1 to 3."
    ),
]
RecordedOption = Annotated[str | None, typer.Option(help="Tables that step record measures; by default the first.")]
FromNothingOption = Annotated[
    bool, typer.Option("--from-nothing", help="Begin without the packaged library's kernels.")
]
BeginOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A library whose tables a new directory has from the start. May be repeated: the first that has a "
        "problem counts.",
    ),
]
AdoptOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory of another GPU's build: tables that are missing begin with its finalists, in place of a "
        "search. Steps trial and choose decide among them.",
    ),
]
JobOption = Annotated[str | None, typer.Option(hidden=True, help="One job, in this process.")]

#: What each step does, below the options in ``--help``; a paragraph after "\b" keeps its lines.
STEPS_HELP = """
Every step runs for every table, in a process of its own. A STEM is a table in small letters with underscores.

\b
record   measures the catalogue                                            -> WORK/recording/
tune     searches the problems that have no row yet                        -> WORK/library.json
borrow   tries what won on shapes nearby; the better kernel stays
refine   tries neighbours of the best candidates; the better kernel stays
trial    times the fastest kernels of every row, in one start of the machine -> WORK/STEM_trial_START.jsonl
choose   chooses each row's kernels from the pooled rounds of the trials
trial_workloads times the plain kernels with cold caches (mode offline_cold) and as single requests (mode server)
choose_workloads gives a row a second winner where one is surely over 2% faster than its plain kernel there
judge    times the library against every baseline, in one start      -> WORK/STEM_judge_START.parquet
merge    publishes the median of three judging starts for each row   -> WORK/STEM_offline.parquet
bench    times the library in the other modes, in one start          -> WORK/STEM_MODE.parquet

These run only when --steps names them:

\b
intervals searches a suite's weights for every M, e.g. --tables engine:TN:bf16:fp32 -> WORK/STEM_intervals/
prove_intervals proves such intervals of another library (--begin-with) with today's kernel sources
gates    searches kernels with SiLU for suite engine's gate/up weights, after intervals -> WORK/STEM_gates/
again    searches rows that fall back or barely win once more; then trial
search_cold times neighbours of the plain kernels with cold caches; then trial_workloads
judge_cold times the library with cold caches in one start           -> WORK/STEM_judge_cold_START.parquet
merge_cold publishes the median of three such starts for each row    -> WORK/STEM_offline_cold.parquet
reopen   searches the rows that trials chose once more; then trial with --starts 4, 5 and 6
reopen_again searches rows for which reopen found nothing new; then trial with --starts 7, 8 and 9

Starts 1 to 3 of trial and judge are interleaved rounds; start "block" times large products alone, each at its
settled clock. Figures differ from start to start, so give each start a freshly started machine (--starts).

A recorded table begins with the recording's best. Another one begins with what won on the same M, N, K in the
tables before it, and with the ranking model's choices. The packaged library's kernels are tried, too.

The seconds of every step are in the library's provenance; with --from-nothing they are in WORK/retune.json, too.
To publish, copy WORK/recording/*.parquet and library.json into src/outblas/data, copy the benches and retune.json
into results/h200, and run `outblas results --write`.
"""


def build_library(
    work: WorkOption = None,
    gpus: GpusOption = "0",
    tables: TablesOption = None,
    steps: StepsOption = None,
    modes: ModesOption = None,
    extra: ExtraOption = None,
    recorded: RecordedOption = None,
    starts: StartsOption = None,
    from_nothing: FromNothingOption = False,
    begin_with: BeginOption = None,
    adopt: AdoptOption = None,
    check: CheckOption = None,
    job: JobOption = None,
) -> None:
    """Record, tune, choose and judge the published tables, into one library (GPU, hours, resumable)."""
    if check is not None:
        from outblas.cli.contribute import check_contribution

        check_contribution(check)
        return
    if work is None:
        raise UsageError("no --work", "a directory of everything that is made", "e.g. --work build/library")
    from outblas_lab.build.build_run import DEFAULT_STEPS, STEPS, build, jobs, parse_names
    from outblas_lab.build.build_work import TABLES, BuildFolder
    from outblas_lab.build.finalist_trials import ALL_STARTS, DEFAULT_STARTS

    place = BuildFolder(common.folder("--work", work), common.integers("--gpus", gpus), from_nothing)
    if job is not None:
        _run_alone(place, job)
        return
    chosen = _tables(tables, TABLES)
    listed = jobs(
        list(DEFAULT_STEPS) if steps is None else parse_names(steps, list(STEPS), "--steps"),
        chosen,
        MODES if modes is None else parse_names(modes, MODES, "--modes"),
        _tables(extra, TABLES[:1]),
        _tables(recorded, TABLES[:1]),
        DEFAULT_STARTS if starts is None else parse_names(starts, ALL_STARTS, "--starts"),
    )
    libraries = common.files("--begin-with", begin_with)
    sibling = None if adopt is None else common.folder("--adopt", adopt)
    build(place, listed, chosen, libraries, sibling)
    if place.library.exists():
        out.print(f"library: {place.library}", markup=False)
    benches = sorted(place.path.glob("*.parquet"))
    for path in benches:
        out.print(f"bench: {path}", markup=False)
    made = place.library if place.library.exists() else None
    common.print_result("build-library", {"library": made, "benches": benches}, jobs=len(listed))


def _run_alone(work: BuildFolder, job: str) -> None:
    """Run one job in this process. The parent process reports how to resume."""
    from outblas.core.process_group import one_interrupt
    from outblas.core.workload import MODE_OF_WORKLOAD
    from outblas_lab.build.build_run import STARTS_OF_STEP, STEPS, run_job

    step, *rest = job.split() or [""]
    modes = {"bench": MODES, "trial_workloads": tuple(MODE_OF_WORKLOAD.values())}
    third = (modes | STARTS_OF_STEP).get(step, ())
    if step not in STEPS or len(rest) != 1 + bool(third) or (third and rest[1] not in third):
        raise UsageError(f"--job {job!r}", "a step, a table and, of some, a mode or a start", "leave it out")
    work.path.mkdir(parents=True, exist_ok=True)
    try:
        with one_interrupt():
            run_job(work, [step, *rest])
    except KeyboardInterrupt as error:
        err.print(f"interrupted{': ' if str(error) else ''}{error}", markup=False)
        raise typer.Exit(EXIT_INTERRUPT) from None


def _tables(text: str | None, default: tuple[Table, ...]) -> list[Table]:
    from outblas.core.suites import Table

    return list(default) if text is None else [Table.parse(each) for each in text.split(",")]
