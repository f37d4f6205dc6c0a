"""Join benches of one library from several starts of the machine: of each row the one with the median speed-up."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.records.result_rows import Row, problem_of

#: Columns that identify a row in a bench.
_KEY = ("m", "n", "k", "layout", "dtype", "acc", "mode", "pdl", "early")


def median_rows(benches: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row per problem and launch option, in the order of the first bench.

    It is the whole row of the start whose published speed-up is the median. Its ``by_start`` has the published
    speed-ups of all starts, in their order.

    Args:
        benches: rows of each start; an odd number of starts, all with the same problems and launch options.

    Raises:
        UsageError: the number of starts is even, their rows are of other problems, or a kernel failed in a start. Its
            row counts as 1 there, so a median of the other starts would hide the failure.
    """
    if len(benches) % 2 == 0:
        raise UsageError(
            f"{len(benches)} benches", "an odd number, so that each row has a median", "add or leave out one"
        )
    by_key = [{tuple(row[c] for c in _KEY): row for row in rows} for rows in benches]
    if any(known.keys() != by_key[0].keys() for known in by_key):
        raise UsageError("benches of other problems or launch options", "the same in all", "bench the same table")
    for number, rows in enumerate(benches, 1):
        for row in rows:
            if row["status"] not in (Status.PASSED.value, Status.LEFT_OUT.value):
                raise UsageError(
                    f"a kernel of {problem_of(row).key} failed in bench {number} ({row['status']})",
                    "kernels that pass in every start",
                    "bench that start again if the machine failed, else search the row again",
                )
    found = []
    for key in by_key[0]:
        rows = [known[key] for known in by_key]
        middle = sorted(rows, key=lambda row: row["published"])[len(rows) // 2]
        found.append({**middle, "by_start": [row["published"] for row in rows]})
    return found
