"""Second winners of a table's rows: plain kernels that are faster with cold caches, or as single requests.

Step ``search_cold``: kernels that win with warm caches are hardly better with cold ones than each other. So neighbours
of a row's plain kernel, and winners of nearby shapes, are timed with L2 evicted. The best join the trials' candidates.

Step ``trial_workloads``: a trial of mode ``offline_cold`` proves the kernels and times them with L2 evicted. One of
mode ``server`` serves single requests by ``outblas.matmul`` with each kernel that passed there. In both, the row's
fall-back is timed, too, and an algorithm of cuBLASLt. With cold caches, it is the one that autotuning chooses there.
Requests are served by the first answer of the heuristic: its call costs the host less than torch.matmul's.

Step ``choose_workloads`` chooses second winners from the trials. It needs no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outblas.core.config import KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, RIVALS
from outblas.core.stats import paired_speedup, unpaired_speedup
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.core.workload import MODE_OF_WORKLOAD
from outblas.dispatch.unlisted_shapes import ask_cublaslt
from outblas.judge.bench_cell import Options
from outblas.judge.fallback_entry import FALLBACK
from outblas.judge.rounds import timing_of_samples
from outblas.kernels.config_text import config_from_name
from outblas.records.library import Library
from outblas.records.library_merge import without_second_winners
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner, algorithm_of_detail
from outblas.records.provenance import start_of_machine
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import SEEDS, BuildFolder, proved
from outblas_lab.build.choosing import pooled
from outblas_lab.build.finalist_trials import (
    MANY,
    TrialEntry,
    TrialStation,
    finished_trial,
    keep_trial,
    live_station,
    read_trial,
    samples_to_json,
)
from outblas_lab.build.finalists import near_the_best, plain_finalists
from outblas_lab.build.library_tables import replace_rows, rows_of_table
from outblas_lab.build.open_rows import near_candidates
from outblas_lab.pool.latency import RequestPlan
from outblas_lab.pool.run_bench import caller, serving_gpus
from outblas_lab.pool.serving import PublicApi, time_public_api

#: Name of the search in its file, and its rounds: the trials decide.
SEARCH, SEARCH_ROUNDS = "search_cold", 9
#: Kernels of a problem beside its plain choice and finalists.
BUDGET = 14
#: Kernels that join the trials' candidates, at most, and how far behind the best of them, as a factor of speed.
BEST, WITHIN = 3, 1 / 1.02


def search_cold(work: BuildFolder, table: Table) -> None:
    """Time kernels for the products below 1e11 FLOP with cold caches, and keep every sample.

    The file is ``<stem>_trial_search_cold.jsonl``. A finished search is left as it is, a killed one goes on. The GPUs
    of the work share the problems. Larger products hardly depend on the caches.

    Raises:
        UsageError: the table is not tuned, or changed since the search began.
    """
    chosen = cold_candidates(work, table)
    if finished_trial(work, table, SEARCH, chosen):
        print(f"search_cold {table}: already done", flush=True)
        return
    options = replace(cold_options(work, table, SEARCH, SEARCH_ROUNDS, ()), level="cell")
    keep_trial(work, table, SEARCH, chosen, SEARCH_ROUNDS, live_station(work, chosen, options))


def cold_options(work: BuildFolder, table: Table, step: str, rounds: int, rivals: tuple[str, ...]) -> Options:
    """Return the options of evaluation with cold caches: all kernels of a problem share its rounds.

    Args:
        step: a key of :data:`outblas_lab.build.build_work.SEEDS`.
    """
    return Options(
        work.gpu_index, gpu_of_device(work.gpu_index), rounds=rounds, baselines=rivals, chunk=MANY,
        mode=MODE_OF_WORKLOAD["cold"], seed=SEEDS[step], proved=proved(work, table), speedups=False,
    )  # fmt: skip


def cold_candidates(work: BuildFolder, table: Table) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the plain kernels that the search times: the plain choice, finalists, then up to 14 others.

    Raises:
        UsageError: the table is not tuned.
    """
    gpu = gpu_of_device(work.gpu_index)
    rows = {row.problem: row for row in rows_of_table(work.load(), table).rows if row.problem.flops < BLOCK_FLOP}
    known = plain_finalists(work, table, rows)
    won: dict[Problem, dict[Launch, KernelConfig]] = {p: {"plain": found[0]} for p, found in known.items() if found}
    found = {}
    for problem in won:
        near = [c for c in near_candidates(problem, won, gpu) if launch_of(c) == "plain"]
        found[problem] = list(dict.fromkeys((*known[problem], *near[:BUDGET])))
    return found


def best_of_cold_search(work: BuildFolder, table: Table) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> up to three kernels within 2% of the best of a finished search; empty without one."""
    if not finished_trial(work, table, SEARCH):
        return {}
    best = {}
    for problem, entry in read_trial(work, table, SEARCH).items():
        speed = {config_from_name(name): 1 / timing.median_us for name, timing in entry.timings.items()}
        ranked = sorted(speed, key=lambda config: (-speed[config], config_name(config)))
        best[problem] = near_the_best(ranked, "plain", speed, BEST, WITHIN)
    return best


COLD, SERVER = MODE_OF_WORKLOAD["cold"], MODE_OF_WORKLOAD["single"]
#: Kernels of a problem, at most, with the row's plain choice.
PER_PROBLEM = 6
#: Names of the trials with cold caches, one for each start of the machine. A kernel is some percent faster or slower
#: from start to start, and so is an algorithm.
COLD_STARTS = (COLD, f"{COLD}_2", f"{COLD}_3")
#: Interleaved rounds of each.
COLD_ROUNDS = 27
#: Requests of each entry, below 1e11 FLOP and from there on, where a request takes milliseconds.
REQUESTS, LONG_REQUESTS = 200, 100


def run_workload_trial(work: BuildFolder, table: Table, mode: str) -> None:
    """Time a table's plain kernels and fall-backs under a workload, and keep every sample.

    The file is ``<stem>_trial_<mode>.jsonl``. A finished trial is left as it is, a killed one goes on. With cold caches
    there is one file for each of three starts of the machine, and a call makes the one of this start.

    Args:
        mode: ``offline_cold``, or ``server``, which comes after it. That one uses the GPUs for which the host has cores
            enough (:func:`outblas_lab.pool.run_bench.serving_gpus`).

    Raises:
        UsageError: the table is not tuned or changed since the trial began, or the cold trial is missing for mode
            ``server``.
    """
    rows = {row.problem: row for row in rows_of_table(work.load(), table).rows}
    chosen = workload_candidates(work, table, rows)
    if mode == SERVER:
        if not finished_trial(work, table, COLD):
            raise UsageError(
                f"trial {COLD} of {table} is not finished",
                f"this trial to be finished before mode {SERVER}, because it proves the kernels",
                f"run `outblas build-library --work {work.path} --tables {table} --steps trial_workloads`",
            )
        passed = read_trial(work, table, COLD)
        chosen = {p: [c for c in configs if config_name(c) in passed[p].timings] for p, configs in chosen.items()}
    start = _start_to_make(work, table, mode, chosen)
    if not start:
        print(f"trial {table} {mode}: already done", flush=True)
    elif mode == SERVER:
        gpus = serving_gpus(work.gpus)
        keep_trial(work, table, mode, chosen, REQUESTS, _server_station(rows, chosen, len(gpus) == 1), gpus)
    else:
        fallbacks = {problem: row.fallback for problem, row in rows.items()}
        options = cold_options(work, table, "trial_workloads", COLD_ROUNDS, (LT_AUTO,))
        options = replace(options, seed=options.seed + COLD_STARTS.index(start))
        station = live_station(work, chosen, options, fallbacks)
        keep_trial(work, table, start, chosen, COLD_ROUNDS, station)


def finished_starts(work: BuildFolder, table: Table, mode: str) -> dict[str, list[dict[str, Any]]]:
    """Return name -> lines of a mode's finished trials, which are those of :data:`COLD_STARTS` with cold caches."""
    trials = {start: finished_trial(work, table, start) for start in _starts(mode)}
    return {start: lines for start, lines in trials.items() if lines}


def _starts(mode: str) -> tuple[str, ...]:
    """Return the names of a mode's trials."""
    return COLD_STARTS if mode == COLD else (mode,)


def _start_to_make(work: BuildFolder, table: Table, mode: str, chosen: Mapping[Problem, Sequence[KernelConfig]]) -> str:
    """Return the first of a mode's trials that is not finished; empty if none is left, or this start has made one.

    Raises:
        UsageError: a finished one timed other kernels.
    """
    for start in _starts(mode):
        lines = finished_trial(work, table, start, chosen)
        if not lines:
            return start
        if lines[-1]["provenance"]["machine"] == start_of_machine():
            return ""
    return ""


def workload_candidates(
    work: BuildFolder, table: Table, rows: Mapping[Problem, LibraryRow]
) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the plain kernels that may become second winners, the row's plain choice first.

    They are the best of a search with cold caches, if there was one, and the finalists of all trials. Those of other
    launch options take part without programmatic dependent launch.

    Raises:
        UsageError: the table is not tuned.
    """
    searched = best_of_cold_search(work, table)
    return {
        problem: list(dict.fromkeys([*configs[:1], *searched.get(problem, ()), *configs]))[:PER_PROBLEM]
        for problem, configs in plain_finalists(work, table, rows).items()
    }


def _server_station(
    rows: Mapping[Problem, LibraryRow], chosen: Mapping[Problem, Sequence[KernelConfig]], alone: bool
) -> TrialStation:
    """Return a station that serves requests by ``outblas.matmul`` with each kernel of a problem."""

    @contextmanager
    def station(index: int, todo: Sequence[Problem]) -> Iterator[Callable[[Problem], dict[str, Any]]]:
        with caller(alone) as call:
            yield lambda problem: call(_served, rows[problem], chosen[problem], index)

    return station


@functools.cache
def _lt() -> LtAlgorithms:
    """Return cuBLASLt's algorithms, opened once for a process."""
    return LtAlgorithms()


def _first_answer(problem: Problem, gpu_index: int) -> str:
    """Return the first answer of cuBLASLt's heuristic, which torch.matmul runs or an equal one; empty without any."""
    return next(iter(ask_cublaslt(_lt(), gpu_index, problem)), "")


def _served(row: LibraryRow, configs: Sequence[KernelConfig], gpu_index: int) -> dict[str, Any]:
    """Return the line of one problem. A kernel that could not be loaded has no time: torch served its requests."""
    gpu = gpu_of_device(gpu_index).name
    without = replace(without_second_winners(row), plain=None, pdl=None, weights=None)
    choices = {config_name(config): LibraryChoice(config, 1.0, 1.0, 1.0) for config in configs}
    rows = {FALLBACK: without, **{name: replace(without, plain=choice) for name, choice in choices.items()}}
    answer = _first_answer(row.problem, gpu_index)
    if answer and answer != row.fallback:
        rows[LT_HEURISTIC] = replace(without, baseline=LT_HEURISTIC, baseline_detail=answer)
    entries = {name: PublicApi(gpu_index, Library(gpu, (each,)), "stream") for name, each in rows.items()}
    plan = RequestPlan(requests=REQUESTS if row.problem.flops < BLOCK_FLOP else LONG_REQUESTS)
    times = time_public_api(entries, row.problem, plan, gpu_index)
    failed = {name for name, entry in entries.items() if entry.failures}
    samples = {
        name: samples_to_json(timing_of_samples(SERVER, times.choosing[name].samples_us + timing.samples_us))
        for name, timing in times.judging.items()
        if name not in failed
    }
    return {
        "problem": row.problem.key,
        "rivals": {name: samples.pop(name) for name in (FALLBACK, LT_HEURISTIC) if name in samples},
        "details": {FALLBACK: row.fallback, LT_HEURISTIC: answer},
        "left_out": {},
        "kernels": samples,
        "failed": {name: Status.LAUNCH_ERROR.value for name in choices if name in failed},
    }


#: A second winner is installed if the lower bound of its speed-up over the plain choice is above this.
SECOND_ABOVE = 1.02


def choose_workloads(work: BuildFolder, table: Table) -> None:
    """Choose the second winners of a table's rows, and save them in the work's library.

    A workload without a finished trial keeps the second winners that the rows have.

    Raises:
        UsageError: the table is not tuned, no trial is finished, or one did not time a row's plain choice.
    """
    library = work.load()
    part = rows_of_table(library, table)
    begun = {mode: finished_starts(work, table, mode) for mode in MODE_OF_WORKLOAD.values()}
    if not any(begun.values()):
        raise UsageError(
            f"no trial of {table} under another workload is finished",
            f"a finished trial in mode {' or '.join(MODE_OF_WORKLOAD.values())}",
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
    entry = pooled(entries)
    # Entries whose algorithm is not the same in every start are left out.
    said = {name: {algorithm_of_detail(each.details.get(name, "")) for each in entries} for name in RIVALS}
    entry = replace(entry, timings={n: timing for n, timing in entry.timings.items() if len(said.get(n, {""})) == 1})
    plain = FALLBACK if row.plain is None else config_name(row.plain.config)
    if plain not in entry.timings:
        if plain in entry.failed or plain == FALLBACK:
            return None
        raise UsageError(
            f"the trial of {row.problem.key} in mode {mode} lacks the plain choice {plain}",
            "a trial of the installed kernels",
            "delete that trial's file and rerun step `trial_workloads`",
        )
    others = {name: over_plain(entry, plain, name, mode) for name in entry.timings if name != plain}
    sure = {
        name: figures
        for name, figures in others.items()
        if figures[1] > SECOND_ABOVE
        and all(start.timings[name].median_us < start.timings[plain].median_us for start in entries)
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
