"""Choose the kernels of a table from the pooled rounds of its trials. It needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name
from outblas.core.evaluation import Evaluation, Status, Timing
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, RIVALS, fastest_baseline
from outblas.core.stats import paired_speedup
from outblas.core.suites import Table
from outblas.judge.rounds import speedup, timing_of_samples
from outblas.kernels.config_text import config_from_name
from outblas.records.library_row import LibraryChoice, LibraryRow, qualified_kernels
from outblas_lab.build.build_work import REOPENED_STARTS, BuildFolder
from outblas_lab.build.finalist_trials import ALL_STARTS, BLOCK, STARTS, TrialEntry, finished_trial, read_trial
from outblas_lab.build.library_tables import replace_rows, rows_of_table

#: A kernel is installed if the lower bound of its pooled speed-up is above this: the pooled rounds hold the noise
#: between starts.
POOLED_INSTALL_ABOVE = 1.0
#: An algorithm runs in place of torch.matmul if the lower bound of its speed-up over that is above this. One algorithm,
#: called by two names, differs by 0.5% from start to start.
SURELY_FASTER_ABOVE = 1.005


def choose(work: BuildFolder, table: Table) -> None:
    """Choose the kernels and the fall-backs of a tuned table, and save them in the work's library.

    Products below :data:`outblas.core.suites.BLOCK_FLOP` are chosen from three trials. Those with new finalists of step
    ``reopen`` are chosen from the trials 4 to 6 instead, those of ``reopen_again`` from 7 to 9. Larger products are
    chosen from the trial in blocks; without it they keep the kernels of the search.

    Raises:
        UsageError: the table is not tuned, or a trial is missing.
    """
    library = work.load()
    part = rows_of_table(library, table)
    found = pooled_trials(work, table)
    rows = [chosen_row(r.problem, found[r.problem], r.source) if r.problem in found else r for r in part.rows]
    trials = {start: finished_trial(work, table, start) for start in ALL_STARTS}
    begun = {start: lines[-1]["provenance"] for start, lines in trials.items() if len(lines) > 1}
    named = ("date", "commit", "machine")  # older trials lack the last
    chosen_from = {start: {key: made[key] for key in named if key in made} for start, made in begun.items()}
    about, before = dict(part.provenance), part.provenance.get("chosen_from")
    if found:
        about["chosen_from"] = chosen_from
        if before not in (None, chosen_from) and len(found) < len(rows):  # other rows keep their choice
            about["chosen_before"] = [*part.provenance.get("chosen_before", ()), before]
    replace_rows(library, rows, table, about).save(work.library)
    fall = {launch: sum(row.choice(launch) is None for row in rows) for launch in LAUNCHES}
    others = [name for name in RIVALS if name != "cublas"]
    unnamed = sum(
        all(surely_faster(found[row.problem].timings, "cublas", name) for name in others)
        for row in rows
        if row.plain is None and row.problem in found
    )
    print(
        f"choose {table}: {len(found)} of {len(rows)} problems chosen by trials; fallbacks: {fall['plain']} plain, "
        f"{fall['pdl']} with PDL, {fall['weights']} with constant weights; plain cuBLAS was significantly "
        f"faster than the other baselines on {unnamed}",
        flush=True,
    )


def pooled_trials(work: BuildFolder, table: Table) -> dict[Problem, TrialEntry]:
    """Return problem -> the rounds of the trials that choose its kernel, one after the other.

    Of several such trials the latest count. Large products are missing without a trial in blocks.

    Raises:
        UsageError: a trial is missing, or timed other problems.
    """
    groups = [STARTS]
    groups += [starts for step, starts in REOPENED_STARTS.items() if work.reopened_finalists(table, step).exists()]
    found: dict[Problem, TrialEntry] = {}
    for starts in sorted(groups, key=lambda starts: _finished_at(work, table, starts)):
        found |= pooled_starts(work, table, starts)
    if finished_trial(work, table, BLOCK):
        found |= read_trial(work, table, BLOCK)
    return found


def _finished_at(work: BuildFolder, table: Table, starts: Sequence[str]) -> str:
    """Return when the last of some trials was finished, ISO 8601; empty if none is."""
    lines = (finished_trial(work, table, start) for start in starts)
    return max((each[-1]["provenance"].get("date", "") for each in lines if each), default="")


def pooled_starts(work: BuildFolder, table: Table, starts: Sequence[str] = STARTS) -> dict[Problem, TrialEntry]:
    """Return problem -> the rounds of some trials, one after the other.

    Args:
        starts: names of the trials. By default they are 1 to 3, of products below 1e11 FLOP. Those of a step that
            reopened rows have the rows with new finalists alone.

    Raises:
        UsageError: a trial is missing, or timed other problems.
    """
    trials = [read_trial(work, table, start) for start in starts]
    return {problem: pooled([trial[problem] for trial in trials]) for problem in trials[0]}


def pooled(entries: Sequence[TrialEntry]) -> TrialEntry:
    """Return one entry with the rounds of several trials of one problem.

    Entries that a trial did not time are left out. A kernel that failed once has failed.
    """
    names = [n for n in entries[0].timings if all(n in entry.timings for entry in entries)]
    failed = {name: status for entry in entries for name, status in entry.failed.items()}
    timings = {name: _joined([entry.timings[name] for entry in entries]) for name in names}
    return TrialEntry(timings, entries[-1].details, failed)


def chosen_row(problem: Problem, entry: TrialEntry, source: str) -> LibraryRow:
    """Return the decision for one problem.

    Of the kernels whose lower bound is above 1.00, the fastest in the mean of all rounds wins. A kernel with two levels
    can have the better median and lose. The row names an algorithm of cuBLASLt only if that was surely faster than
    torch.matmul.

    Args:
        source: source of the times, e.g. ``cuda:0``.
    """
    timings = entry.timings
    times = {name: timings[name].median_us for name in RIVALS if name in timings}
    tried = [
        Evaluation(
            problem, config_from_name(name), Status.PASSED, "", None, timing, times, speedup(timings, name, RIVALS)
        )  # fmt: skip
        for name, timing in timings.items()
        if name not in RIVALS
    ]
    plain, pdl, weights = (_fastest_in_the_mean(timings, tried, launch) for launch in LAUNCHES)
    best = fastest_baseline(times)
    auto = _algorithm(entry, LT_AUTO)
    if best in (LT_AUTO, LT_HEURISTIC):
        detail, auto = _algorithm(entry, best) or auto, ""
    else:
        detail = entry.details.get(best, "")
    weights = None if weights == pdl else weights
    return LibraryRow(problem, best, detail, source, plain, pdl, auto, weights)


def _fastest_in_the_mean(
    timings: Mapping[str, Timing], tried: Sequence[Evaluation], launch: Launch
) -> LibraryChoice | None:
    def mean_log(choice: LibraryChoice) -> tuple[float, str]:
        name = config_name(choice.config)
        return -fmean(map(math.log, timings[name].samples_us)), name

    return max(qualified_kernels(tried, launch, POOLED_INSTALL_ABOVE), key=mean_log, default=None)


def kernel_ratios(entry: TrialEntry) -> dict[KernelConfig, float]:
    """Return kernel -> its speed-up over the fastest rival, the ratio of medians, for the kernels of a trial."""
    rivals = min(entry.timings[name].median_us for name in RIVALS if name in entry.timings)
    kernels = {name: timing for name, timing in entry.timings.items() if name not in RIVALS}
    return {config_from_name(name): rivals / timing.median_us for name, timing in kernels.items()}


def _algorithm(entry: TrialEntry, name: str) -> str:
    """Return the algorithm of a cuBLASLt rival if that was surely faster than torch.matmul; else an empty text."""
    return entry.details.get(name, "") if surely_faster(entry.timings, name) else ""


def surely_faster(timings: Mapping[str, Timing], name: str, than: str = "torch") -> bool:
    """Return whether an entry was faster than another beyond the noise. False if one of them was not timed.

    Args:
        timings: name -> time, of the same rounds.
    """
    if name not in timings or than not in timings:
        return False
    mine, theirs = timings[name].samples_us, timings[than].samples_us
    both = min(len(mine), len(theirs))  # one that was dropped has fewer
    low = paired_speedup(mine[:both], theirs[:both])[1]
    return low > SURELY_FASTER_ABOVE


def _joined(parts: Sequence[Timing]) -> Timing:
    first = parts[0]
    samples = [us for part in parts for us in part.samples_us]
    return replace(timing_of_samples(first.mode, samples, first.repeats, first.operand_sets), sm_mhz=first.sm_mhz)
