"""Build everything that is measured on a GPU: recording, library and published results. Resumable.

The steps of every table run one after the other. Each has a process of its own (`outblas build-library --job ...`), so
that no state of one helps the next. A finished step is not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import OutblasError, UsageError
from outblas.core.files import lock_folder, write_json
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.process_group import run_to_end
from outblas.core.roofline import Gpu
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.core.workload import MODE_OF_WORKLOAD
from outblas.kernels.catalogue import catalogue_of
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_merge import replace_intervals, replace_weights
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_searches import (
    refine_table,
    search_weak_rows_again,
    try_neighbour_winners,
    tune_table,
)
from outblas_lab.build.build_work import REOPENED_STARTS, TABLES, BuildFolder, printer
from outblas_lab.build.choosing import choose
from outblas_lab.build.finalist_trials import ALL_STARTS, DEFAULT_STARTS, JUDGED_STARTS, STARTS, run_trial
from outblas_lab.build.finalists import names_of_finalists, read_finalists
from outblas_lab.build.judging import bench, judge, merge
from outblas_lab.build.large_fallbacks import choose_fallbacks
from outblas_lab.build.library_tables import rows_of_table, with_table_rows
from outblas_lab.build.open_rows import search_open_rows
from outblas_lab.build.weight_intervals import prove_intervals, search_gates, search_intervals
from outblas_lab.build.workloads import COLD, choose_workloads, run_workload_trial, search_cold
from outblas_lab.pool.record_suite import run_record
from outblas_lab.pool.retuning import RETUNE_FILE as RETUNE
from outblas_lab.pool.retuning import retune_record, seconds_by_step


def record(work: BuildFolder, table: Table) -> None:
    if any(set(table.problems()) <= set(recording.problems) for recording in work.recorded()):
        print(f"record {table}: already done", flush=True)
        return
    progress, kernels = printer(f"record {table}"), catalogue_of(gpu_of_device(work.gpu_index))
    run_record(table.problems(), table.suite, kernels, work.recording, work.gpu_index, progress)


Step = Callable[..., None]
DEFAULT_STEPS: dict[str, Step] = {
    "record": record,
    "tune": tune_table,
    "borrow": try_neighbour_winners,
    "refine": refine_table,
    "trial": run_trial,
    "choose": choose,
    "trial_workloads": run_workload_trial,
    "choose_workloads": choose_workloads,
    "judge": judge,
    "merge": merge,
    "bench": bench,
}
STEPS: dict[str, Step] = {
    **DEFAULT_STEPS,
    "intervals": search_intervals,
    "prove_intervals": prove_intervals,
    "gates": search_gates,
    "again": search_weak_rows_again,
    "choose_fallbacks": choose_fallbacks,
    "search_cold": search_cold,
    "judge_cold": partial(judge, mode=COLD),
    "merge_cold": partial(merge, mode=COLD),
    **{step: partial(search_open_rows, step=step) for step in REOPENED_STARTS},
}
#: Step -> the starts of the machine that it can make, each a job of its own.
STARTS_OF_STEP: dict[str, tuple[str, ...]] = {"trial": ALL_STARTS, "judge": JUDGED_STARTS, "judge_cold": STARTS}
#: Steps that only read what others measured.
STEPS_WITHOUT_GPU = ("choose", "choose_fallbacks", "choose_workloads", "merge", "merge_cold")
#: What makes the library; the rest looks at it.
LIBRARY_STEPS = (
    "record", "tune", "intervals", "borrow", "refine", "again", "trial", *REOPENED_STARTS, "choose", "choose_fallbacks",
    "search_cold", "trial_workloads", "choose_workloads",
)  # fmt: skip


#: Part of a library -> joins that of another library and its own, which goes first.
_JOINED = {"intervals": replace_intervals, "gates": replace_weights}


def copy_tables_from(work: BuildFolder, files: Sequence[Path]) -> None:
    """Give a directory the tables of other libraries that it lacks; of a problem the row of the first that has one.

    So it gets their intervals of tables whose intervals it lacks. Rows and intervals that the directory has stay. A
    table that was made with other kernel sources names their hash in its provenance; its bench in mode ``offline``
    proves its kernels with today's.

    Raises:
        UsageError: the libraries are of different kinds of GPU.
    """
    found = [Library.load(file) for file in files]
    libraries = [work.load(), *found] if work.library.exists() else found
    if not libraries:
        return
    gpus = sorted({library.gpu for library in libraries})
    if len(gpus) > 1:
        wrong = f"the libraries are for {', '.join(gpus)}"
        raise UsageError(wrong, "libraries for one GPU model", "omit the libraries for other models")
    rows: dict[Problem, LibraryRow] = {}
    tables: dict[str, Any] = {}
    for library in libraries:
        rows = {row.problem: row for row in library.rows} | rows
        sources = {"kernels": library.provenance["kernels"]} if library.provenance.get("kernels") else {}
        tables = {name: {**sources, **about} for name, about in library.provenance["tables"].items()} | tables
    first = libraries[0]
    whole = first  # with the intervals and gates of the others for the tables whose it lacks
    for other, (kind, joined) in product(libraries[1:], _JOINED.items()):
        known, more = whole.provenance.get(kind, {}), other.provenance.get(kind, {})
        if more.keys() - known.keys():
            own: dict[str, Any] = {kind: joined(getattr(other, kind), getattr(whole, kind))}
            whole = replace(whole, provenance={**whole.provenance, kind: {**more, **known}}, **own)
    if work.library.exists() and whole is first and tables.keys() == first.provenance["tables"].keys():
        return
    replace(whole, rows=tuple(rows.values()), provenance={**whole.provenance, "tables": tables}).save(work.library)


def build(
    work: BuildFolder,
    listed: Sequence[Sequence[str]],
    tables: Sequence[Table],
    libraries: Sequence[Path] = (),
    sibling: Path | None = None,
) -> None:
    """Lock the directory, take over tables, then run the jobs.

    Args:
        libraries: files of libraries whose tables the directory takes over if it lacks them (:func:`copy_tables_from`).
        sibling: directory of another GPU's build, whose finalists begin the tables that are missing (:func:`adopt`).

    Raises:
        OutblasError: a job failed; the same call resumes.
        RecordError: another process uses the directory.
        UsageError: the directory or a library does not fit.
    """
    with lock_folder(work.path):
        copy_tables_from(work, libraries)
        if sibling is not None:
            work.check()
            adopt(work, sibling, tables)
        run_jobs(work, listed)


def jobs(
    steps: Sequence[str], tables: Sequence[Table], modes: Sequence[str], extra: Sequence[Table],
    recorded: Sequence[Table] = TABLES[:1], starts: Sequence[str] = DEFAULT_STARTS,
) -> list[list[str]]:  # fmt: skip
    """Return the jobs of some steps in the order in which they must run.

    A job is ``[step, table]``; ``[step, table, mode]`` for ``bench`` and ``trial_workloads``; ``[step, table, start]``
    for ``trial``, ``judge`` and ``judge_cold``.

    The table is a text. The order is that of ``steps``, and within a step that of ``tables``; for ``bench`` it is by
    mode, then by table. Example: ``jobs(["tune"], [table], [], [])`` returns ``[["tune", "grid1000:TN:fp16:fp32"]]``
    for that table.

    Args:
        modes: modes of step ``bench``. Mode ``offline`` benches every table. Step ``trial_workloads`` takes
            ``offline_cold``, and ``server`` after it.
        extra: tables that are benched in the modes other than ``offline``, too, and that have second winners, if they
            are in ``tables``.
        recorded: tables that step ``record`` measures, if they are in ``tables``. Default: grid1000 in TN, fp16, fp32.
        starts: starts of the machine that steps ``trial`` and ``judge`` make, e.g. ``["1", "block"]``. By default 1 to
            3 and ``block``. Only ``trial`` has 4 to 9, and ``judge_cold`` has 1 to 3.
    """
    found: list[list[str]] = []
    for step in steps:
        if step == "record":
            found += [[step, str(table)] for table in tables if table in recorded]
        elif step in STARTS_OF_STEP:
            mine = [start for start in starts if start in STARTS_OF_STEP[step]]
            found += [[step, str(table), start] for start in mine for table in tables]
        elif step == "bench":
            found += [[step, str(t), mode] for mode in modes for t in tables if mode == "offline" or t in extra]
        elif step == "trial_workloads":
            found += [[step, str(t), mode] for mode in _trial_modes(modes) for t in tables if t in extra]
        elif step == "choose_workloads":
            found += [[step, str(table)] for table in tables if table in extra and _trial_modes(modes)]
        else:
            found += [[step, str(table)] for table in tables]
    return found


def _trial_modes(modes: Sequence[str]) -> list[str]:
    """Return the modes of step ``trial_workloads``: those named, and the ones before them, which prove the kernels."""
    order = list(MODE_OF_WORKLOAD.values())
    last = max((order.index(mode) for mode in modes if mode in order), default=-1)
    return order[: last + 1]


def run_job(work: BuildFolder, job: Sequence[str]) -> None:
    """Run one job in this process. Those of :data:`STEPS_WITHOUT_GPU` need no GPU.

    Raises:
        UsageError: the directory is of other kernels or another GPU (:meth:`BuildFolder.check`), or the table is
            unknown.
        KeyError: no step has that name.
    """
    step, table, *which = job
    if step in STEPS_WITHOUT_GPU:
        work.check_kernels()
    else:
        work.check()
    STEPS[step](work, Table.parse(table), *which)


def run_jobs(work: BuildFolder, listed: Sequence[Sequence[str]]) -> None:
    """Run the jobs one after the other, each in a fresh process, and print the seconds of each.

    The seconds go to ``seconds.json``, those of a failed job included. At the end, the line of :func:`publish_seconds`
    is printed. Without jobs nothing happens.

    Raises:
        OutblasError: a job failed. The jobs after it are not run.
        KeyboardInterrupt: Ctrl-C, once the job has kept what it finished.
    """
    seconds: dict[str, float] = {}
    for job in listed:
        begin = monotonic()
        try:
            ended = run_to_end(command_of_job(work, job), counts_repeats=False)
            if ended.interrupted:
                raise KeyboardInterrupt
            if ended.status:
                raise OutblasError(
                    f"{' '.join(job)} failed with status {ended.status}",
                    "every job to succeed",
                    "fix the error above and rerun the command; it resumes",
                )
        finally:
            spent = monotonic() - begin
            kept, name = work.path / "seconds.json", " ".join(job)
            do = "move the file elsewhere; it holds only the times of jobs"
            seconds = dict(read_object(kept, "a file written by a build", do)) if kept.exists() else {}
            seconds[name] = round(seconds.get(name, 0.0) + spent, 1)
            write_json(kept, seconds)
            print(f"{' '.join(job)}: {spent:.0f} s", flush=True)
    if listed:  # without jobs the library keeps the seconds that it has
        print(publish_seconds(work, seconds), flush=True)


def command_of_job(work: BuildFolder, job: Sequence[str]) -> list[str]:
    """Return the arguments of a process that runs one job, the Python interpreter first.

    After ``-m outblas build-library`` come ``--work PATH``, ``--gpus N,N`` and ``--job``. The last argument is
    the job, e.g. ``"tune llm:TN:fp16:fp32"``. With ``work.from_nothing``, ``--from-nothing`` stands before ``--job``.
    """
    command = [sys.executable, "-m", "outblas", "build-library", "--work", str(work.path)]
    command += ["--gpus", ",".join(map(str, work.gpus))]
    command += ["--from-nothing"] if work.from_nothing else []
    return [*command, "--job", " ".join(job)]


def publish_seconds(work: BuildFolder, seconds: dict[str, float]) -> str:
    """Write the seconds into the library's provenance and return the totals as a line of text.

    Example: ``{"tune A": 60.0, "bench A offline": 60.0}`` gives
    ``tune 60 s, bench 60 s; the library took 1.0 of 2.0 GPU minutes``. Steps ``judge``, ``merge`` and ``bench``
    do not count as making the library.

    The provenance gets ``seconds`` and ``seconds_of_making``, in which jobs of a build that this one began with stay.
    A library that was made from nothing also gets the record ``retune.json`` beside it. Without a library nothing is
    written.
    """
    made_in = _of_making(seconds)
    making = sum(made_in.values())
    if work.library.exists():
        library = Library.load(work.library)
        every = {**library.provenance.get("seconds", {}), **seconds}
        spent = {"seconds": every, "seconds_of_making": round(sum(_of_making(every).values()), 1)}
        provenance = {**library.provenance, **spent}
        provenance.setdefault("kernels", kernels_sha())  # another's, brought here, is not of these kernels by that
        library = replace(library, provenance=provenance)
        library.save(work.library)
        if work.from_nothing:
            write_json(work.path / RETUNE, retune_record(library, made_in))
    each = ", ".join(f"{step} {spent:.0f} s" for step, spent in seconds_by_step(seconds).items())
    return f"{each}; the library took {making / 60:.1f} of {sum(seconds.values()) / 60:.1f} GPU minutes"


def _of_making(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the jobs of the steps that make the library, with their seconds."""
    return {name: spent for name, spent in seconds.items() if name.split()[0] in LIBRARY_STEPS}


def parse_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the words of a text, separated by commas, as a list in order.

    Duplicates stay. Blanks are part of a word: ``"a, b"`` has the word ``" b"``. An empty text is one empty word.

    Raises:
        UsageError: a word is not in ``known``.
    """
    words = text.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise UsageError(f"unknown {option} {','.join(unknown)}", f"any of {', '.join(known)}", "correct them")
    return words


def adopt(work: BuildFolder, other: Path, tables: Sequence[Table]) -> None:
    """Give tables that a directory lacks the finalists of another GPU's build, in place of a search.

    Of each row the last list of finalists counts, since a later search tries the earlier one's best again. The kernels
    that the other library installs are finalists, too. Kernels that are illegal on this GPU are left out.

    The new rows have no kernel: nothing was timed here. The steps ``trial`` and ``choose`` give them theirs. Each table
    is one printed line, e.g. ``adopt llm:TN:fp16:fp32: 1318 finalists from h200``.

    Args:
        work: directory of the build; its library and its lists of finalists are saved.
        other: directory of the other build, with ``library.json`` and, if it has trials, its lists of finalists.
        tables: the tables to begin; those that work has stay.

    Raises:
        UsageError: ``other`` has no library, is of the same kind of GPU, or lacks a table.
    """
    source = BuildFolder(other)
    if not source.library.exists():
        raise UsageError(f"{other} has no library.json", "another GPU's build directory", "correct the path")
    gpu, library, theirs = gpu_of_device(work.gpu_index), work.load(), Library.load(source.library)
    if theirs.gpu == gpu.name:
        raise UsageError(
            f"{other} is for the same GPU model, {gpu.name}", "another model's build", "use --begin-with for its tables"
        )
    for table in tables:
        if str(table) in library.provenance["tables"]:
            continue
        found = _finalists_here(source, rows_of_table(theirs, table), table, gpu)
        write_json(work.finalists(table), names_of_finalists(found))
        about = {key: theirs.provenance[key] for key in ("date", "commit")}
        measured = {**collect_provenance(f"adopt {table}", work.gpu_index), "adopted": {"gpu": theirs.gpu, **about}}
        fresh = [LibraryRow(p) for p in found if library.row_of(p) is None]
        library = with_table_rows(library, fresh, table, measured)
        library.save(work.library)
        print(f"adopt {table}: {sum(map(len, found.values()))} finalists from {theirs.gpu}", flush=True)


def _finalists_here(source: BuildFolder, part: Library, table: Table, gpu: Gpu) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the finalists that another build has for it and that are legal here."""
    last: dict[Problem, list[KernelConfig]] = {}
    lists = (source.finalists(table), *(source.reopened_finalists(table, step) for step in REOPENED_STARTS))
    for path in filter(Path.exists, lists):
        last |= read_finalists(path)
    found = {p: dict.fromkeys((*last.get(p, ()), *configs)) for p, configs in part.installed().items()}
    # Blocks choose large products, and among plain kernels only.
    return {
        p: [c for c in configs if (p.flops < BLOCK_FLOP or launch_of(c) == "plain") and why_illegal(p, c, gpu) is None]
        for p, configs in found.items()
    }
