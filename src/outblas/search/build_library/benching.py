"""Bench the library of a table in one mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.bench.run_bench import BenchRequest, run_bench
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.suites import Table, block_problems, sample
from outblas.records.library import Library
from outblas.records.library_tables import is_bench_of, rows_of_table
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.build_work import SEEDS, BuildFolder, printer, proved

BENCH_ROUNDS = 11
SERVER_SAMPLE, SERVER_QPS = 100, 200.0


def bench(work: BuildFolder, table: Table, mode: str) -> None:
    """Bench a table's library in one start of the machine, and write its result file; a finished bench is kept.

    Mode ``server`` times a sample of 100 problems, mode ``block`` the products from 1e11 FLOP on.

    Args:
        work: directory of the build.
        table: the table.
        mode: mode of the bench.

    Raises:
        UsageError: the table is not tuned.
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
        return
    rate = SERVER_QPS if mode == "server" else None
    benched(f"bench {table} {mode}", work, table, problems, part, out, mode, seed=SEEDS["bench"], target_qps=rate)


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
        table: the table.
        problems: problems to time.
        part: library of the table's rows.
        out: result file, a ``.parquet``.
        mode: ``offline``, ``offline_cold``, ``server`` or ``block``.
        more: further fields of :class:`outblas.bench.run_bench.BenchRequest`.

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
