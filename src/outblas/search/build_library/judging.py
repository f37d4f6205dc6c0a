"""Judge a table's library in three starts of the machine, and publish the median of each row.

The starts are others than those of the trials, so no figure is of the rounds that chose the kernel. All are kept, and
none takes a kernel back.
"""

from __future__ import annotations

from pathlib import Path

from outblas.core.errors import UsageError
from outblas.core.suites import Table
from outblas.records.library_tables import is_bench_of, rows_of_table
from outblas.records.results import Result, median_rows, read_result, write_result
from outblas.search.build_library.benching import bench, benched
from outblas.search.build_library.build_work import SEEDS, BuildFolder
from outblas.search.build_library.finalist_trials import BLOCK, STARTS
from outblas.search.build_library.workload_trials import COLD

OFFLINE = "offline"
#: Mode of a judging bench -> the step that makes it; the name of its file has this word.
JUDGING_STEPS = {OFFLINE: "judge", COLD: "judge_cold"}


def judge_path(work: BuildFolder, table: Table, start: str, mode: str = OFFLINE) -> Path:
    """Return the file of one judging bench, ``<stem>_<step>_<start>.parquet`` in the work's directory.

    Example: ``build/h200/grid1000_tn_fp16_fp32_judge_1.parquet``. The file need not exist.

    Args:
        work: directory of the build.
        start: ``1``, ``2`` or ``3``.
        mode: ``offline`` or ``offline_cold``.
    """
    return work.path / f"{table.stem}_{JUDGING_STEPS[mode]}_{start}.parquet"


def judge(work: BuildFolder, table: Table, start: str, mode: str = OFFLINE) -> None:
    """Bench a table's library in one start of the machine.

    A finished bench is left as it is. One that was killed goes on where it was, if the machine was not started anew
    since.

    Args:
        work: directory of the build.
        table: the table; its kernels must be chosen.
        start: ``1``, ``2`` or ``3``; ``block``: large products in blocks, into the table's result file, whatever the
            mode.
        mode: ``offline`` or ``offline_cold``.

    Raises:
        UsageError: the table is not tuned.
    """
    if start == BLOCK:
        bench(work, table, "block")
        return
    out, part, problems = judge_path(work, table, start, mode), rows_of_table(work.load(), table), table.problems()
    what = f"{JUDGING_STEPS[mode]} {table} {start}"
    if out.exists() and is_bench_of(out, part, problems):
        print(f"{what}: done before", flush=True)
        return
    seed = SEEDS["judge"] + int(start)
    benched(what, work, table, problems, part, out, mode, seed=seed, one_start=True)


def merge(work: BuildFolder, table: Table, mode: str = OFFLINE) -> None:
    """Write the table's result file of a mode: each row is that of the start whose speed-up is the median of three.

    Benches in fewer than three starts of the machine are merged, too. A line says so, and no page gives an interval.

    Args:
        work: directory of the build.
        mode: ``offline`` or ``offline_cold``.

    Raises:
        UsageError: a judging bench is missing, or is of another library or toolchain.
        RecordError: a file is damaged.
    """
    part = rows_of_table(work.load(), table)
    results = [_judged(work, table, start, mode) for start in STARTS]
    for result in results:
        if not is_bench_of(result.path, part, table.problems()):
            raise UsageError(f"{result.path} is of another library", "a bench of this one", "delete it and judge again")
        if result.provenance["toolchain"] != results[0].provenance["toolchain"]:
            raise UsageError(
                f"{result.path} and {results[0].path.name} are of different toolchains",
                f"{results[0].provenance['toolchain']} in all",
                "delete what is older and judge again",
            )
    starts = [{key: result.provenance[key] for key in ("date", "commit", "driver", "machine")} for result in results]
    spent = round(sum(result.provenance.get("gpu_seconds", 0.0) for result in results), 1)
    meta = {**results[0].meta, "provenance": {**results[0].provenance, "starts": starts, "gpu_seconds": spent}}
    write_result(median_rows([result.rows for result in results]), meta, work.result(table, mode))
    machines = len({start["machine"] for start in starts})
    few = "" if machines == len(starts) else f", in {machines} different starts of the machine: no interval is shown"
    print(f"merge {table} {mode}: the medians of {len(results)} benches{few}", flush=True)


def _judged(work: BuildFolder, table: Table, start: str, mode: str) -> Result:
    path = judge_path(work, table, start, mode)
    if not path.exists():
        raise UsageError(
            f"judging bench {start} of {table} is missing",
            f"those of {', '.join(STARTS)}",
            f"run `outblas build-library --work {work.path} --tables {table} "
            f"--steps {JUDGING_STEPS[mode]} --starts {start}`",
        )
    return read_result(path)
