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
    Path | None, typer.Option(help="Build directory, required unless --check is given. Rerun the command to resume.")
]
CheckOption = Annotated[
    Path | None, typer.Option(help="Only verify a file from `outblas contribute`. This needs no GPU and no --work.")
]
GpusOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated CUDA indices of the GPUs to use. All GPUs run trials and benches; only the first "
        "GPU runs searches."
    ),
]
TablesOption = Annotated[
    str | None, typer.Option(help="Comma-separated tables SUITE:LAYOUT:DTYPE:ACC (default: all published tables).")
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated steps to run (default: all steps of the first list in --help, from `record` to `bench`)."
    ),
]
ModesOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated modes in which the `bench` step times the library (default: "
        + ", ".join(MODES)
        + "). Tables not in --extra are timed only offline. Step `trial_workloads` uses only offline_cold and server."
    ),
]
ExtraOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated tables to bench in all modes and to search for second winners (default: the first)."
    ),
]
StartsOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated machine starts (boots) to run now, by number, or block for the block start (default: "
        "1,2,3,block). Step `trial` has starts 1 to 9 and block; step `judge` has starts 1 to 3 and block; step "
        "`judge_cold` has starts 1 to 3."
    ),
]
RecordedOption = Annotated[str | None, typer.Option(help="Comma-separated tables to record (default: the first).")]
FromNothingOption = Annotated[
    bool, typer.Option("--from-nothing", help="Start without the kernels of the packaged library.")
]
BeginOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Initial library of a new build directory. Repeatable; each problem is taken from the first "
        "library that contains it.",
    ),
]
AdoptOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Build directory of another GPU. Each table missing from --work starts with the other GPU's finalists "
        "instead of a search. Steps `trial` and `choose` then select among these finalists.",
    ),
]
JobOption = Annotated[str | None, typer.Option(hidden=True, help="Run one job in this process.")]

#: What each step does, below the options in ``--help``; a paragraph after "\b" keeps its lines.
STEPS_HELP = """
Each step runs in a separate process for every table. STEM is the table's name in lower case with underscores.

\b
record   measures the catalogue                                            -> WORK/recording/
tune     finds kernels for problems without a library row                 -> WORK/library.json
borrow   tries winners of nearby shapes and keeps the faster kernel
refine   tries neighbors of the best candidates and keeps the faster kernel
trial    times the fastest kernels of every row, in one machine start -> WORK/STEM_trial_START.jsonl
choose   chooses the kernels of each row from the pooled rounds of all trials
trial_workloads times the plain kernels with cold caches (mode offline_cold) and as single requests (mode server)
choose_workloads adds a second winner to a row if one beats the plain kernel by significantly more than 2%
judge    times the library against all baselines, in one start       -> WORK/STEM_judge_START.parquet
merge    publishes the median of three judge starts for each row     -> WORK/STEM_offline.parquet
bench    times the library in the other modes, in one start          -> WORK/STEM_MODE.parquet

The following steps run only if --steps names them:

\b
intervals finds kernels for every M of a suite's weights, e.g. --tables engine:TN:bf16:fp32 -> WORK/STEM_intervals/
prove_intervals proves the intervals of another library (--begin-with) with the current kernel sources
gates    finds kernels with SiLU for the gate/up weights of suite engine; run it after `intervals` -> WORK/STEM_gates/
choose_fallbacks names cuBLASLt algorithms for large problems by earlier benches in modes offline and block
again    repeats the search for rows that fall back to a baseline or barely win; run `trial` next
search_cold times neighbors of the plain kernels with cold caches; run `trial_workloads` next
judge_cold times the library with cold caches, in one start          -> WORK/STEM_judge_cold_START.parquet
merge_cold publishes the median of three judge_cold starts for each row -> WORK/STEM_offline_cold.parquet
reopen   repeats the search for rows that trials chose; run `trial` with --starts 4,5,6 next
reopen_again repeats the search for rows that reopen did not improve; run `trial` with --starts 7,8,9 next

In starts 1 to 3, `trial` and `judge` time kernels in interleaved rounds. In start "block", they time each kernel of a
large problem alone, at its settled clock. Results vary between machine starts, so restart the machine before each
start (--starts).

A recorded table starts with the best kernels of its recording. Any other table starts with the winners for the same
M, N, K in earlier tables and with the choices of the ranking model. Kernels of the packaged library are also tried.

The library's provenance records how many seconds each step took. With --from-nothing, WORK/retune.json does so, too.
To publish, copy WORK/recording/*.parquet and library.json into src/outblas/data, copy the benches and retune.json
into results/h200, and run `python tools/published_pages.py --write`.
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
    """Build a library: record, tune, choose and judge kernels for all tables (needs a GPU for hours; resumable)."""
    if check is not None:
        from outblas.cli.contribute import check_contribution

        check_contribution(check)
        return
    if work is None:
        raise UsageError("--work is missing", "the build directory", "pass e.g. --work build/library")
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
        raise UsageError(f"--job {job!r} is invalid", "STEP TABLE, or STEP TABLE MODE_OR_START", "omit --job")
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
