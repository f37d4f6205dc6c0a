"""A search with cold caches: step ``search_cold`` of `outblas build-library`.

Kernels that win with warm caches are hardly better with cold ones than each other. So neighbours of a row's plain
kernel, and winners of nearby shapes, are timed with L2 evicted. The best join the candidates of the workload trials.
"""

from __future__ import annotations

from dataclasses import replace

from outblas.core.config import KernelConfig, Launch, config_name, launch_of
from outblas.core.problem import Problem
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.core.workload import MODE_OF_WORKLOAD
from outblas.judge.bench_cell import Options
from outblas.kernels.config_text import config_from_name
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import SEEDS, BuildFolder, proved
from outblas_lab.build.finalist_trials import (
    MANY,
    TrialEntry,
    finished_trial,
    keep_trial,
    live_station,
    read_trial,
)
from outblas_lab.build.finalists import near_the_best
from outblas_lab.build.library_tables import rows_of_table
from outblas_lab.build.open_rows import near_candidates
from outblas_lab.build.plain_finalists import plain_finalists

#: Name of the search in its file, and its rounds: the trials decide.
SEARCH, ROUNDS = "search_cold", 9
#: Kernels of a problem beside its plain choice and finalists.
BUDGET = 14
#: Kernels that join the trials' candidates, at most, and how far behind the best of them, as a factor of speed.
BEST, WITHIN = 3, 1 / 1.02


def search_cold(work: BuildFolder, table: Table) -> None:
    """Time kernels for the products below 1e11 FLOP with cold caches, and keep every sample.

    The file is ``<stem>_trial_search_cold.jsonl``. A finished search is left as it is, a killed one goes on. The GPUs
    of the work share the problems. Larger products hardly depend on the caches.

    Args:
        work: directory of the build.
        table: the table; its kernels must be chosen.

    Raises:
        UsageError: the table is not tuned, or changed since the search began.
    """
    chosen = cold_candidates(work, table)
    if finished_trial(work, table, SEARCH, chosen):
        print(f"search_cold {table}: done before", flush=True)
        return
    options = replace(cold_options(work, table, SEARCH, ROUNDS, ()), level="cell")
    keep_trial(work, table, SEARCH, chosen, ROUNDS, live_station(work, chosen, options))


def cold_options(work: BuildFolder, table: Table, step: str, rounds: int, rivals: tuple[str, ...]) -> Options:
    """Return the options of evaluation with cold caches: all kernels of a problem share its rounds.

    Args:
        work: directory of the build.
        table: the table, whose known proofs are reused.
        step: a key of :data:`outblas_lab.build.build_work.SEEDS`.
        rounds: interleaved rounds.
        rivals: baselines that are timed beside the kernels.
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
    return {problem: _fastest(entry) for problem, entry in read_trial(work, table, SEARCH).items()}


def _fastest(entry: TrialEntry) -> list[KernelConfig]:
    speed = {config_from_name(name): 1 / timing.median_us for name, timing in entry.timings.items()}
    ranked = sorted(speed, key=lambda config: (-speed[config], config_name(config)))
    return near_the_best(ranked, "plain", speed, BEST, WITHIN)
