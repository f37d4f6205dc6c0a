"""The steps that build a library, each of one table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outblas.bench.record_suite import run_record
from outblas.core.suites import Table
from outblas.kernels.catalogue import catalogue_of
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.benching import bench
from outblas.search.build_library.build_searches import (
    refine_table,
    try_neighbour_winners,
    tune_table,
)
from outblas.search.build_library.build_work import REOPENED_STARTS, BuildFolder, printer
from outblas.search.build_library.choosing import choose
from outblas.search.build_library.cold_search import search_cold
from outblas.search.build_library.finalist_trials import ALL_STARTS, JUDGED_STARTS, STARTS, run_trial
from outblas.search.build_library.gate_search import search_gates
from outblas.search.build_library.judging import judge, merge
from outblas.search.build_library.open_rows import search_open_rows
from outblas.search.build_library.weak_rows import search_weak_rows_again
from outblas.search.build_library.weight_intervals import prove_intervals, search_intervals
from outblas.search.build_library.workload_choosing import choose_workloads
from outblas.search.build_library.workload_trials import COLD, run_workload_trial


def record(work: BuildFolder, table: Table) -> None:
    if any(set(table.problems()) <= set(recording.problems) for recording in work.recorded()):
        print(f"record {table}: done before", flush=True)
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
    "search_cold": search_cold,
    "judge_cold": partial(judge, mode=COLD),
    "merge_cold": partial(merge, mode=COLD),
    **{step: partial(search_open_rows, step=step) for step in REOPENED_STARTS},
}
#: Step -> the starts of the machine that it can make, each a job of its own.
STARTS_OF_STEP: dict[str, tuple[str, ...]] = {"trial": ALL_STARTS, "judge": JUDGED_STARTS, "judge_cold": STARTS}
#: Steps that only read what others measured.
STEPS_WITHOUT_GPU = ("choose", "choose_workloads", "merge", "merge_cold")
#: What makes the library; the rest looks at it.
LIBRARY_STEPS = (
    "record", "tune", "intervals", "borrow", "refine", "again", "trial", *REOPENED_STARTS, "choose", "search_cold",
    "trial_workloads", "choose_workloads",
)  # fmt: skip
