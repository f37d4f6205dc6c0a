"""Step ``choose_fallbacks``: name cuBLASLt algorithms for large problems by two earlier benches. It needs no GPU.

Interleaved rounds (mode ``offline``) and blocks (mode ``block``) clock a large product differently. In rounds it runs
at the frequency that all entries share, in a block at its own. An algorithm may win in one of them and lose in the
other, so both count alike. The library must then be judged in other starts of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.records.library_row import LibraryRow, algorithm_of_detail
from outblas.records.result_rows import launch_of_row, problem_of
from outblas.records.results import Result, read_result
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.choosing import SURELY_FASTER_ABOVE
from outblas_lab.build.library_tables import replace_rows, rows_of_table

#: Modes of the benches that choose.
MODES = ("offline", "block")


def choose_fallbacks(work: BuildFolder, table: Table) -> None:
    """Name algorithms in a table's large fall-backs, and save them in the work's library.

    Second winners stay, though they were timed beside torch.

    Raises:
        UsageError: the table is not tuned, or a bench of it is missing.
        RecordError: a bench is damaged.
    """
    library = work.load()
    part = rows_of_table(library, table)
    benches = {mode: _bench(work, table, mode) for mode in MODES}
    plain = [_plain_rows(result) for result in benches.values()]
    rows = [with_algorithm(row, [each.get(row.problem, {}) for each in plain]) for row in part.rows]
    made = {mode: {key: found.provenance[key] for key in ("date", "commit")} for mode, found in benches.items()}
    replace_rows(library, rows, table, {**part.provenance, "fallbacks_from": made}).save(work.library)
    named = sum(new is not old for new, old in zip(rows, part.rows, strict=True))
    print(f"choose_fallbacks {table}: algorithms of autotuned cuBLASLt named in {named} rows", flush=True)


def with_algorithm(row: LibraryRow, benched: list[Mapping[str, Any]]) -> LibraryRow:
    """Return a row with the algorithm of autotuned cuBLASLt in place of its fall-back, or the row itself.

    The product of its speed-ups over the fall-back, which is torch.matmul or an earlier algorithm, in all benches must
    be above :data:`outblas_lab.build.choosing.SURELY_FASTER_ABOVE`. Where benches found different algorithms, that of
    the first is named.

    Args:
        benched: of each bench the row of the problem without PDL; an empty one counts as not timed.
    """
    if row.problem.flops < BLOCK_FLOP or row.plain is not None:
        return row
    gain = 1.0
    for bench in benched:
        own, algorithms = bench.get("ours_us" if row.fallback else "torch_us"), bench.get("lt_auto_us")
        if own is None or algorithms is None:  # blocks time few rivals alone
            return row
        if algorithm_of_detail(bench["lt_auto_detail"]) != row.fallback:  # else these are two times of one algorithm
            gain *= own / algorithms
    made = replace(row, baseline=LT_AUTO, baseline_detail=benched[0]["lt_auto_detail"], lt_auto_detail="")
    return made if gain > SURELY_FASTER_ABOVE and made.fallback != row.fallback else row


def _bench(work: BuildFolder, table: Table, mode: str) -> Result:
    path = work.result(table, mode)
    if not path.exists():
        raise UsageError(
            f"{path} is missing",
            f"benches of {table} in the modes {' and '.join(MODES)}",
            f"run `outblas build-library --work {work.path} --tables {table} --steps bench --modes {mode}`",
        )
    return read_result(path)


def _plain_rows(result: Result) -> dict[Problem, Mapping[str, Any]]:
    """Return problem -> its row without PDL."""
    return {problem_of(row): row for row in result.rows if launch_of_row(row) == "plain"}
