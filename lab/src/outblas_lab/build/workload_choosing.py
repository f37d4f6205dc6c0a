"""Choose the second winners of a table from its trials under other workloads. It needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, RIVALS
from outblas.core.stats import paired_speedup, unpaired_speedup
from outblas.core.suites import Table
from outblas.core.workload import MODE_OF_WORKLOAD
from outblas.judge.fallback_entry import FALLBACK
from outblas.kernels.config_text import config_from_name
from outblas.records.library_row import LibraryRow, SecondWinner, algorithm_of_detail
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.choosing import pooled
from outblas_lab.build.finalist_trials import TrialEntry, read_trial
from outblas_lab.build.library_tables import replace_rows, rows_of_table
from outblas_lab.build.workload_trials import COLD, finished_starts

#: A second winner is installed if the lower bound of its speed-up over the plain choice is above this.
SECOND_ABOVE = 1.02


def choose_workloads(work: BuildFolder, table: Table) -> None:
    """Choose the second winners of a table's rows, and save them in the work's library.

    A workload without a finished trial keeps the second winners that the rows have.

    Args:
        work: directory of the build.
        table: the table; its kernels must be chosen.

    Raises:
        UsageError: the table is not tuned, no trial is finished, or one did not time a row's plain choice.
    """
    library = work.load()
    part = rows_of_table(library, table)
    begun = {mode: finished_starts(work, table, mode) for mode in MODE_OF_WORKLOAD.values()}
    if not any(begun.values()):
        raise UsageError(
            f"no trial of {table} under another workload is finished",
            " or ".join(MODE_OF_WORKLOAD.values()),
            f"run `outblas build-library --work {work.path} --tables {table} --steps trial_workloads`",
        )
    rows, installed = list(part.rows), dict[str, int]()
    for workload, mode in MODE_OF_WORKLOAD.items():
        if begun[mode]:
            starts = [read_trial(work, table, start) for start in begun[mode]]
            seconds: dict[str, Any] = {
                r.problem.key: second_winner(r, [start[r.problem] for start in starts], mode) for r in rows
            }
            rows = [replace(row, **{workload: seconds[row.problem.key]}) for row in rows]
            installed[workload] = sum(second is not None for second in seconds.values())
    made = {start: lines[-1]["provenance"] for trials in begun.values() for start, lines in trials.items()}
    about = {start: {key: found[key] for key in ("date", "commit")} for start, found in made.items()}
    replace_rows(library, rows, table, {**part.provenance, "workloads_from": about}).save(work.library)
    counts = ", ".join(f"{count} for workload {workload}" for workload, count in installed.items())
    print(f"choose_workloads {table}: second winners in {len(rows)} rows: {counts}", flush=True)


def second_winner(row: LibraryRow, entries: Sequence[TrialEntry], mode: str) -> SecondWinner | None:
    """Return what is surely more than 2% faster than a row's plain choice: a kernel, the fall-back, or an algorithm.

    None if nothing is. The algorithm is what autotuning chose with cold caches; for requests, the first answer of
    cuBLASLt's heuristic. Where a row falls back to torch, a lower median is enough for the latter: the product of torch
    comes by a cheaper call then.

    If several are, the highest lower bound wins. In several starts of the machine, the rounds of all count, and the
    median must be lower in each.

    Args:
        entries: its times, one entry for each start of the machine; at least one.
        mode: mode of the trials, ``offline_cold`` or ``server``.

    Raises:
        UsageError: the trial did not try the row's plain choice.
    """
    entry = of_all_starts(entries)
    plain = FALLBACK if row.plain is None else config_name(row.plain.config)
    if plain not in entry.timings:
        if plain in entry.failed or plain == FALLBACK:
            return None
        raise UsageError(
            f"the trial of {row.problem.key} in mode {mode} lacks the plain choice {plain}",
            "a trial of the kernels that are installed now",
            "delete the file of that trial and run step trial_workloads again",
        )
    others = {name: over_plain(entry, plain, name, mode) for name in entry.timings if name != plain}
    sure = {
        name: figures
        for name, figures in others.items()
        if figures[1] > SECOND_ABOVE and all(_is_faster(each, name, plain) for each in entries)
    }
    cheaper = others.get(LT_HEURISTIC)
    if not sure and row.plain is None and not row.fallback and cheaper is not None and cheaper[0] > 1:
        sure[LT_HEURISTIC] = cheaper
    if not sure:
        return None
    best = max(sure, key=lambda name: (sure[name][1], sure[name][0], name))
    if best in (LT_AUTO, LT_HEURISTIC):
        return SecondWinner(None, *sure[best], algorithm_of_detail(entry.details[best]))
    return SecondWinner(None if best == FALLBACK else config_from_name(best), *sure[best])


def of_all_starts(entries: Sequence[TrialEntry]) -> TrialEntry:
    """Return one entry with the rounds of all starts; a rival that ran another algorithm in one of them is left out."""
    found = pooled(entries)
    said = {name: {algorithm_of_detail(each.details.get(name, "")) for each in entries} for name in RIVALS}
    same = {name: timing for name, timing in found.timings.items() if len(said.get(name, {""})) == 1}
    return replace(found, timings=same)


def _is_faster(entry: TrialEntry, name: str, than: str) -> bool:
    return entry.timings[name].median_us < entry.timings[than].median_us


def over_plain(entry: TrialEntry, plain: str, name: str, mode: str) -> tuple[float, float, float]:
    """Return the speed-up of an entry over the plain choice: (ratio, low, high).

    Cold rounds are paired. Requests are not; if their medians differ by too little, the ratio stands for its bounds.
    """
    mine, theirs = entry.timings[name], entry.timings[plain]
    if mode == COLD:
        return paired_speedup(mine.samples_us, theirs.samples_us)
    ratio = theirs.median_us / mine.median_us
    if ratio <= SECOND_ABOVE:  # no interval can lie above; a bootstrap of every entry takes minutes
        return ratio, ratio, ratio
    return unpaired_speedup(mine.samples_us, theirs.samples_us)
