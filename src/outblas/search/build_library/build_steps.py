"""The steps that build a library, each of one table: record, confirm, bench, demote, settle, and the searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outblas.bench.record_suite import run_record
from outblas.bench.run_bench import BenchRequest, run_bench
from outblas.core.config import LAUNCHES, Launch
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.suites import Table, block_problems, sample
from outblas.kernels.catalogue import catalogue
from outblas.records.library import Library, LibraryChoice
from outblas.records.library_tables import (
    is_bench_of,
    mark_fallbacks,
    rows_of_table,
    slower_kernels,
    with_table_rows,
    without_slow_algorithms,
)
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.build_searches import (
    refine_table,
    search_weak_rows_again,
    try_neighbour_winners,
    tune_table,
)
from outblas.search.build_library.build_work import SEEDS, TABLES, BuildFolder, printer, proved
from outblas.search.build_library.trials import run_trial

BENCH_ROUNDS = 11
#: A win below this in tuning is measured again before it is installed.
CONFIRM_BELOW = 1.04
SERVER_SAMPLE, SERVER_QPS = 100, 200.0


def record(work: BuildFolder, table: Table) -> None:
    if any(set(table.problems()) <= set(recording.problems) for recording in work.recorded()):
        print(f"record {table}: done before", flush=True)
        return
    progress = printer(f"record {table}")
    run_record(table.problems(), table.suite, catalogue(), work.recording, work.gpu_index, progress)


def confirm(work: BuildFolder, table: Table) -> None:
    """Time close winners of a tuned table again, in a process of its own, and drop the kernels that do not win.

    A row is timed if a kernel of any launch option won by less than 1.04. A second call does nothing, until a second
    search changes the table.

    Args:
        work: directory of the build.
        table: the table.

    Raises:
        UsageError: the table is not tuned.
    """
    library = work.load()
    part = rows_of_table(library, table)
    if "confirmed" in part.provenance:
        print(f"confirm {table}: done before", flush=True)
        return
    doubtful = [row.problem for row in part.rows if any(map(_is_close, map(row.choice, LAUNCHES)))]
    lost: list[tuple[Problem, Launch]] = []
    if doubtful:
        path = work.path / f"{table.stem}_confirm.parquet"
        benched(f"confirm {table}", work, table, doubtful, part, path, "offline", seed=3, baselines=RIVALS)
        lost = slower_kernels(path)
    about = {**part.provenance, "confirmed": len(doubtful), "not_confirmed": len(lost)}
    with_table_rows(library.without_kernels(lost), (), table, about).save(work.library)
    print(f"confirm {table}: {len(doubtful)} problems measured again, {len(lost)} kernels not kept", flush=True)


def bench(work: BuildFolder, table: Table, mode: str) -> None:
    out, part, problems = work.result(table, mode), rows_of_table(work.load(), table), table.problems()
    if mode == "server":
        problems = sample(problems, min(SERVER_SAMPLE, len(problems)), gpu=gpu_of_device(work.gpu_index))
    elif mode == "block":
        problems = block_problems(problems)
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
        out: result file.
        mode: mode of the bench.
        more: further fields of :class:`outblas.bench.run_bench.BenchRequest`.
    """

    def bench_once(resume: bool) -> None:
        run_bench(
            BenchRequest(
                problems, table.suite, part, out, (work.gpu_index,), mode, BENCH_ROUNDS, resume,
                proved=proved(work, table), **more,
            ),
            printer(what),
        )  # fmt: skip

    try:
        bench_once(resume=True)
    except UsageError as error:
        print(f"{what}: begins anew: {error}", flush=True)
        bench_once(resume=False)


def demote(work: BuildFolder, table: Table) -> None:
    """Drop the kernels that were not surely ahead in the table's offline bench from the library (needs no GPU).

    If any was dropped, the bench file is renamed to ``..._1.parquet``, then ``..._2.parquet`` and so on. The bench must
    then be repeated, so that repeated calls keep what was ahead in every bench. Without a bench file nothing is
    dropped. The other modes do not count.

    Some kernels are 3 to 6% faster or slower from process to process, depending on the addresses of their operands. No
    interval from one process shows that.

    Args:
        work: directory of the build.
        table: the table.
    """
    path = work.result(table, "offline")
    lost = slower_kernels(path) if path.exists() else []
    if lost:
        work.load().without_kernels(lost).save(work.library)
        earlier = len(list(work.path.glob(f"{path.stem}_[0-9]*.parquet")))
        path.rename(path.with_name(f"{path.stem}_{earlier + 1}.parquet"))
    print(f"demote {table}: {len(lost)} kernels not kept", flush=True)


def settle_by_offline_bench(work: BuildFolder, table: Table) -> None:
    """Drop the kernels that were not surely ahead in the last offline bench, from the library and from its rows.

    A dropped row in the bench files counts as 1, like a fall-back. It keeps its kernel, times and speed-up (needs no
    GPU). Offline benches of other tables with the same problems are marked, too. Slow cuBLASLt algorithms are dropped,
    too.

    Args:
        work: directory of the build.
        table: the table.

    Raises:
        RecordError: the table has no offline bench, or it is damaged.
    """
    path = work.result(table, "offline")
    lost = set(slower_kernels(path))
    without_slow_algorithms(work.load().without_kernels(lost), path).save(work.library)
    for other in TABLES:  # tables share problems, and the library has one row for each
        if work.result(other, "offline").exists():
            mark_fallbacks(work.result(other, "offline"), lost)
    print(f"settle {table}: {len(lost)} kernels not kept", flush=True)


def _is_close(choice: LibraryChoice | None) -> bool:
    return choice is not None and choice.speedup < CONFIRM_BELOW


Step = Callable[..., None]
DEFAULT_STEPS: dict[str, Step] = {
    "record": record,
    "tune": tune_table,
    "borrow": try_neighbour_winners,
    "refine": refine_table,
    "confirm": confirm,
    "bench": bench,
}
STEPS: dict[str, Step] = {
    **DEFAULT_STEPS,
    "demote": demote,
    "settle": settle_by_offline_bench,
    "again": search_weak_rows_again,
    "trial": run_trial,
}
#: What makes the library; the rest looks at it.
LIBRARY_STEPS = ("record", "tune", "borrow", "refine", "again", "confirm")
