"""Bench the library of a table, and judge it in three starts of the machine.

The starts are others than those of the trials, so no figure is of the rounds that chose the kernel. All are kept, and
none takes a kernel back. The median of each row is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table, block_problems, sample
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.proved_kernels import unproved_tables
from outblas.records.results import Result, median_rows, read_result, write_result
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import SEEDS, BuildFolder, printer, proof_by, proved
from outblas_lab.build.finalist_trials import BLOCK, STARTS
from outblas_lab.build.library_tables import is_bench_of, rows_of_table
from outblas_lab.build.workloads import COLD
from outblas_lab.pool.latency import MAX_QPS
from outblas_lab.pool.run_bench import BenchRequest, run_bench

BENCH_ROUNDS = 11
SERVER_SAMPLE = 100


def bench(work: BuildFolder, table: Table, mode: str) -> None:
    """Bench a table's library in one start of the machine, and write its result file; a finished bench is kept.

    Mode ``server`` times a sample of 100 problems, mode ``block`` the products from 1e11 FLOP on. Mode ``offline`` also
    proves a table that was made with other kernel sources (:func:`note_proof`).

    Raises:
        UsageError: the table is not tuned, or it is of other kernel sources and a kernel failed its proof.
    """
    out, part, problems = work.result(table, mode), rows_of_table(work.load(), table), table.problems()
    if mode == "server":
        problems = sample(problems, min(SERVER_SAMPLE, len(problems)), gpu=gpu_of_device(work.gpu_index))
    elif mode == "block":
        problems = block_problems(problems)
        if not problems:
            print(f"bench {table} block: no problem is large enough", flush=True)
            return
    if out.exists() and is_bench_of(out, part, problems):
        print(f"bench {table} {mode}: already done", flush=True)
    else:
        rate = MAX_QPS if mode == "server" else None
        benched(f"bench {table} {mode}", work, table, problems, part, out, mode, seed=SEEDS["bench"], target_qps=rate)
    if mode == "offline" and table in unproved_tables(work.load()):
        note_proof(work, table, read_result(out))


def note_proof(work: BuildFolder, table: Table, result: Result) -> None:
    """Note in the work's library that a bench proved all kernels of a table with today's sources.

    The library itself is of today's sources once all its tables are.

    Args:
        result: its bench in mode ``offline``, which proves every kernel before it is timed.

    Raises:
        UsageError: a kernel failed, or the bench is of other sources. The table stays as it is.
    """
    today = kernels_sha()
    failed = [row for row in result.rows if row["fallback"] and row["status"] != Status.LEFT_OUT.value]
    if failed or result.provenance.get("kernels") != today:
        raise UsageError(
            f"{result.path} does not prove the kernels of {table} ({len(failed)} failed)",
            f"a bench of the kernel sources with hash {today} in which every kernel passes",
            f"search the failed rows again, delete {result.path.name} and bench again",
        )
    library = work.load()
    known = library.provenance["tables"]
    tables = {**known, str(table): {**known[str(table)], "proved": proof_by(result.provenance)}}
    library = replace(library, provenance={**library.provenance, "tables": tables})
    if not unproved_tables(library):
        library = replace(library, provenance={**library.provenance, "kernels": today})
    library.save(work.library)
    print(f"bench {table}: all kernels are proved with the current sources", flush=True)


def benched(
    what: str,
    work: BuildFolder,
    table: Table,
    problems: Sequence[Problem],
    part: Library,
    out: Path,
    mode: str,
    **more: Any,
) -> None:
    """Run a bench of a table's library, or go on with one; a bench of another library begins anew.

    Args:
        more: further fields of :class:`outblas_lab.pool.run_bench.BenchRequest`.

    Raises:
        UsageError: a problem or the mode does not fit.
    """

    def bench_once(resume: bool) -> None:
        run_bench(
            BenchRequest(
                problems, table.suite, part, out, work.gpus, mode, BENCH_ROUNDS, resume,
                proved=proved(work, table), **more,
            ),
            printer(what),
        )  # fmt: skip

    try:
        bench_once(resume=True)
    except UsageError as error:
        print(f"{what}: starting over: {error}", flush=True)
        bench_once(resume=False)


OFFLINE = "offline"
#: Mode of a judging bench -> the step that makes it; the name of its file has this word.
JUDGING_STEPS = {OFFLINE: "judge", COLD: "judge_cold"}


def judge_path(work: BuildFolder, table: Table, start: str, mode: str = OFFLINE) -> Path:
    """Return the file of one judging bench, ``<stem>_<step>_<start>.parquet`` in the work's directory.

    Example: ``build/h200/grid1000_tn_fp16_fp32_judge_1.parquet``. The file need not exist.

    Args:
        start: ``1``, ``2`` or ``3``.
    """
    return work.path / f"{table.stem}_{JUDGING_STEPS[mode]}_{start}.parquet"


def judge(work: BuildFolder, table: Table, start: str, mode: str = OFFLINE) -> None:
    """Bench a table's library in one start of the machine.

    A finished bench is left as it is. One that was killed goes on where it was, if the machine was not started anew
    since.

    Args:
        table: the table; its kernels must be chosen.
        start: ``1``, ``2`` or ``3``; ``block``: large products in blocks, into the table's result file, whatever the
            mode.

    Raises:
        UsageError: the table is not tuned.
    """
    if start == BLOCK:
        bench(work, table, "block")
        return
    out, part, problems = judge_path(work, table, start, mode), rows_of_table(work.load(), table), table.problems()
    what = f"{JUDGING_STEPS[mode]} {table} {start}"
    if out.exists() and is_bench_of(out, part, problems):
        print(f"{what}: already done", flush=True)
        return
    seed = SEEDS["judge"] + int(start)
    benched(what, work, table, problems, part, out, mode, seed=seed, one_start=True)


def merge(work: BuildFolder, table: Table, mode: str = OFFLINE) -> None:
    """Write the table's result file of a mode: each row is that of the start whose speed-up is the median of three.

    Benches in fewer than three starts of the machine are merged, too. A line says so, and no page gives an interval.

    Raises:
        UsageError: a judging bench is missing, or is of another library or toolchain.
        RecordError: a file is damaged.
    """
    part = rows_of_table(work.load(), table)
    results = [_judged(work, table, start, mode) for start in STARTS]
    for result in results:
        if not is_bench_of(result.path, part, table.problems()):
            wrong = f"{result.path} was measured with another library"
            raise UsageError(wrong, "the library of this build", "delete the file and judge again")
    print(f"merge {table} {mode}: {write_medians(results, work.result(table, mode))}", flush=True)


def write_medians(results: Sequence[Result], out: Path) -> str:
    """Write the medians of benches in an odd number of starts of the machine as one result file.

    Returns:
        What the file holds, in words.

    Raises:
        UsageError: the benches had different toolchains or problems, or a kernel failed.
        RecordError: the disk refuses.
    """
    for result in results:
        if _toolchain(result) != _toolchain(results[0]):
            raise UsageError(
                f"{result.path} and {results[0].path.name} used different toolchains",
                f"{_toolchain(results[0])} in every bench",
                "delete the older files and bench again",
            )
    starts = [{key: result.provenance[key] for key in ("date", "commit", "driver", "machine")} for result in results]
    spent = round(sum(result.provenance.get("gpu_seconds", 0.0) for result in results), 1)
    meta = {**results[0].meta, "provenance": {**results[0].provenance, "starts": starts, "gpu_seconds": spent}}
    write_result(median_rows([result.rows for result in results]), meta, out)
    machines = len({start["machine"] for start in starts})
    few = "" if machines == len(starts) else f", in {machines} different starts of the machine: no interval is shown"
    return f"the medians of {len(results)} benches{few}"


def _toolchain(result: Result) -> dict[str, Any]:
    """Return a bench's toolchain, with the hash of the kernels' sources in place of the version of OutBLAS."""
    return {**result.provenance["toolchain"], "outblas": result.provenance.get("kernels")}


def _judged(work: BuildFolder, table: Table, start: str, mode: str) -> Result:
    path = judge_path(work, table, start, mode)
    if not path.exists():
        raise UsageError(
            f"judging bench {start} of {table} is missing",
            f"the benches {', '.join(STARTS)}",
            f"run `outblas build-library --work {work.path} --tables {table} "
            f"--steps {JUDGING_STEPS[mode]} --starts {start}`",
        )
    return read_result(path)
