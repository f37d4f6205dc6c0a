"""Choose the kernels of a table from the pooled rounds of its trials. It needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outblas.core.config import LAUNCHES
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, RIVALS, fastest_baseline
from outblas.core.stats import paired_speedup
from outblas.core.suites import Table, block_problems
from outblas.judge.rounds import speedup, timing_of_samples
from outblas.kernels.config_text import config_from_name
from outblas.records.library import LibraryRow, choose_kernel
from outblas.records.library_tables import replace_rows, rows_of_table
from outblas.search.build_library.build_work import BuildFolder
from outblas.search.build_library.finalist_trials import BLOCK, STARTS, TrialEntry, finished_trial, read_trial

#: A kernel is installed if the lower bound of its pooled speed-up is above this: the pooled rounds hold the noise
#: between starts.
POOLED_INSTALL_ABOVE = 1.0
#: An algorithm runs in place of torch.matmul if the lower bound of its speed-up over that is above this. One algorithm,
#: called by two names, differs by 0.5% from start to start.
SURELY_FASTER_ABOVE = 1.005


def choose(work: BuildFolder, table: Table) -> None:
    """Choose the kernels and the fall-backs of a tuned table, and save them in the work's library.

    Products below :data:`outblas.core.suites.BLOCK_FLOP` are chosen from three trials, the others from the trial in
    blocks.

    Args:
        work: directory of the build.
        table: the table.

    Raises:
        UsageError: the table is not tuned, or a trial is missing.
    """
    library = work.load()
    part = rows_of_table(library, table)
    found = pooled_trials(work, table)
    rows = [chosen_row(row.problem, found[row.problem], row.source) for row in part.rows]
    starts = (*STARTS, BLOCK) if block_problems(table.problems()) else STARTS
    begun = {start: finished_trial(work, table, start)[-1]["provenance"] for start in starts}
    about = {**part.provenance, "chosen_from": {s: {k: p[k] for k in ("date", "commit")} for s, p in begun.items()}}
    replace_rows(library, rows, table, about).save(work.library)
    fall = {launch: sum(row.choice(launch) is None for row in rows) for launch in LAUNCHES}
    unnamed = sum(_only_cublas(found[row.problem]) for row in rows if row.plain is None)
    print(
        f"choose {table}: {len(rows)} problems; fall back: {fall['plain']} plain, {fall['pdl']} with PDL, "
        f"{fall['weights']} with constant weights; on {unnamed} plain cuBLAS alone was surely the fastest",
        flush=True,
    )


def pooled_trials(work: BuildFolder, table: Table) -> dict[Problem, TrialEntry]:
    """Return problem -> the rounds of all its trials, one after the other.

    Raises:
        UsageError: a trial is missing, or timed other problems.
    """
    starts = [read_trial(work, table, start) for start in STARTS]
    found = {problem: pooled([trial[problem] for trial in starts]) for problem in starts[0]}
    if block_problems(table.problems()):
        found |= read_trial(work, table, BLOCK)
    return found


def pooled(entries: Sequence[TrialEntry]) -> TrialEntry:
    """Return one entry with the rounds of several trials of one problem.

    Entries that a trial did not time are left out. A kernel that failed once has failed.

    Args:
        entries: at least one.
    """
    names = [n for n in entries[0].timings if all(n in entry.timings for entry in entries)]
    failed = {name: status for entry in entries for name, status in entry.failed.items()}
    timings = {name: _joined([entry.timings[name] for entry in entries]) for name in names}
    return TrialEntry(timings, entries[-1].details, failed)


def chosen_row(problem: Problem, entry: TrialEntry, source: str) -> LibraryRow:
    """Return the decision for one problem.

    The row names an algorithm of cuBLASLt only if that was surely faster than torch.matmul.

    Args:
        problem: the problem.
        entry: its pooled rounds.
        source: source of the times, e.g. ``cuda:0``.
    """
    timings = entry.timings
    times = {name: timings[name].median_us for name in RIVALS if name in timings}
    tried = [
        Evaluation(problem, config_from_name(name), Status.PASSED, "", None, timing, times, _speedup(timings, name))
        for name, timing in timings.items()
        if name not in RIVALS
    ]
    plain, pdl, weights = (choose_kernel(tried, launch, POOLED_INSTALL_ABOVE) for launch in LAUNCHES)
    best = fastest_baseline(times)
    auto = _algorithm(entry, LT_AUTO)
    if best in (LT_AUTO, LT_HEURISTIC):
        detail, auto = _algorithm(entry, best) or auto, ""
    else:
        detail = entry.details.get(best, "")
    weights = None if weights == pdl else weights
    return LibraryRow(problem, best, detail, source, plain, pdl, auto, weights)


def _algorithm(entry: TrialEntry, name: str) -> str:
    """Return the algorithm of a cuBLASLt rival if that was surely faster than torch.matmul; else an empty text."""
    return entry.details.get(name, "") if surely_faster(entry.timings, name) else ""


def surely_faster(timings: Mapping[str, Timing], name: str, than: str = "torch") -> bool:
    """Return whether an entry was faster than another beyond the noise. False if one of them was not timed.

    Args:
        timings: name -> time, of the same rounds.
        name: the entry.
        than: the other one.
    """
    if name not in timings or than not in timings:
        return False
    low = paired_speedup(timings[name].samples_us, timings[than].samples_us)[1]
    return low > SURELY_FASTER_ABOVE


def _only_cublas(entry: TrialEntry) -> bool:
    return all(surely_faster(entry.timings, "cublas", name) for name in RIVALS if name != "cublas")


def _speedup(timings: Mapping[str, Timing], name: str) -> Speedup:
    return speedup(timings, name, RIVALS)


def _joined(parts: Sequence[Timing]) -> Timing:
    first = parts[0]
    samples = [us for part in parts for us in part.samples_us]
    return replace(timing_of_samples(first.mode, samples, first.repeats, first.operand_sets), sm_mhz=first.sm_mhz)
