"""Trials under another workload than a stream: a row's plain kernels with cold caches, and as single requests.

A trial of mode ``offline_cold`` proves the kernels and times them with L2 evicted. One of mode ``server`` serves single
requests by ``outblas.matmul`` with each kernel that passed there. In both, the row's fall-back is timed, too, and an
algorithm of cuBLASLt. With cold caches, it is the one that autotuning chooses there. Requests are served by the first
answer of the heuristic: its call costs the host less than torch.matmul's.
:mod:`outblas.search.build_library.workload_choosing` chooses second winners from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outblas.bench.run_bench import caller, serving_gpus
from outblas.bench.serving import PublicApi, time_public_api
from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.core.workload import MODE_OF_WORKLOAD
from outblas.dispatch.unlisted_shapes import ask_cublaslt
from outblas.judge.fallback_entry import FALLBACK
from outblas.judge.latency import RequestPlan
from outblas.judge.rounds import timing_of_samples
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.library_tables import rows_of_table, without_second_winners
from outblas.records.provenance import start_of_machine
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.build_work import BuildFolder
from outblas.search.build_library.cold_search import best_of_cold_search, cold_options
from outblas.search.build_library.finalist_trials import (
    TrialStation,
    finished_trial,
    keep_trial,
    live_station,
    read_trial,
    samples_to_json,
)
from outblas.search.build_library.plain_finalists import plain_finalists

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
        work: directory of the build.
        table: the table; its kernels must be chosen.
        mode: ``offline_cold``, or ``server``, which comes after it. That one uses the GPUs for which the host has cores
            enough (:func:`outblas.bench.run_bench.serving_gpus`).

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
                f"it before that of mode {SERVER}: it proves the kernels",
                f"run `outblas build-library --work {work.path} --tables {table} --steps trial_workloads`",
            )
        passed = read_trial(work, table, COLD)
        chosen = {p: [c for c in configs if config_name(c) in passed[p].timings] for p, configs in chosen.items()}
    start = _start_to_make(work, table, mode, chosen)
    if not start:
        print(f"trial {table} {mode}: done before", flush=True)
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

    Args:
        work: directory of the build.
        rows: problem -> its row, for all problems of the table.

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
