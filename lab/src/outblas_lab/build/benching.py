"""Bench the library of a table in one mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table, block_problems, sample
from outblas.judge.latency import MAX_QPS
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.proved_kernels import unproved_tables
from outblas.records.results import Result, read_result
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import SEEDS, BuildFolder, printer, proof_by, proved
from outblas_lab.build.library_tables import is_bench_of, rows_of_table
from outblas_lab.pool.run_bench import BenchRequest, run_bench

BENCH_ROUNDS = 11
SERVER_SAMPLE = 100


def bench(work: BuildFolder, table: Table, mode: str) -> None:
    """Bench a table's library in one start of the machine, and write its result file; a finished bench is kept.

    Mode ``server`` times a sample of 100 problems, mode ``block`` the products from 1e11 FLOP on. Mode ``offline`` also
    proves a table that was made with other kernel sources (:func:`note_proof`).

    Args:
        work: directory of the build.
        mode: mode of the bench.

    Raises:
        UsageError: the table is not tuned, or it is of other kernel sources and a kernel failed its proof.
    """
    out, part, problems = work.result(table, mode), rows_of_table(work.load(), table), table.problems()
    if mode == "server":
        problems = sample(problems, min(SERVER_SAMPLE, len(problems)), gpu=gpu_of_device(work.gpu_index))
    elif mode == "block":
        problems = block_problems(problems)
        if not problems:
            print(f"bench {table} block: no product is large enough", flush=True)
            return
    if out.exists() and is_bench_of(out, part, problems):
        print(f"bench {table} {mode}: done before", flush=True)
    else:
        rate = MAX_QPS if mode == "server" else None
        benched(f"bench {table} {mode}", work, table, problems, part, out, mode, seed=SEEDS["bench"], target_qps=rate)
    if mode == "offline" and table in unproved_tables(work.load()):
        note_proof(work, table, read_result(out))


def note_proof(work: BuildFolder, table: Table, result: Result) -> None:
    """Note in the work's library that a bench proved all kernels of a table with today's sources.

    The library itself is of today's sources once all its tables are.

    Args:
        work: directory of the build.
        result: its bench in mode ``offline``, which proves every kernel before it is timed.

    Raises:
        UsageError: a kernel failed, or the bench is of other sources. The table stays as it is.
    """
    today = kernels_sha()
    failed = [row for row in result.rows if row["fallback"] and row["status"] != Status.LEFT_OUT.value]
    if failed or result.provenance.get("kernels") != today:
        raise UsageError(
            f"{result.path} does not prove the kernels of {table} ({len(failed)} failed)",
            f"a bench with the sources {today} in which every kernel passes",
            f"search the failed rows again, delete {result.path.name} and bench again",
        )
    library = work.load()
    known = library.provenance["tables"]
    tables = {**known, str(table): {**known[str(table)], "proved": proof_by(result.provenance)}}
    library = replace(library, provenance={**library.provenance, "tables": tables})
    if not unproved_tables(library):
        library = replace(library, provenance={**library.provenance, "kernels": today})
    library.save(work.library)
    print(f"bench {table}: all its kernels are proved with today's sources", flush=True)


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
    """Run a bench of a table's library, or continue one that was killed. It begins anew if the library has changed
    since.

    Args:
        what: name of the work in progress lines.
        work: directory of the build.
        problems: problems to time.
        part: library of the table's rows.
        out: result file, a ``.parquet``.
        mode: ``offline``, ``offline_cold``, ``server`` or ``block``.
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
        print(f"{what}: begins anew: {error}", flush=True)
        bench_once(resume=False)
