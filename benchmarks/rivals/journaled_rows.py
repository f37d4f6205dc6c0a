"""The run of a benchmark with one row per problem: a journal while it runs, a result file at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.records.provenance import shared_conditions, source_commit

Row = dict[str, Any]


def journaled_rows(
    out: Path, settings: Mapping[str, Any], keys: Sequence[str], measure: Callable[[list[str]], Iterable[Row]],
    line: Callable[[Row], str], content: Callable[[list[Row]], Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], str] = itemgetter("problem"),
) -> list[Row]:  # fmt: skip
    """Measure the rows that the journal lacks, then write the result file. An interrupted run resumes.

    Args:
        out: result file; the journal lies beside it and ends in ``.jsonl``. It is removed when the file is written.
        settings: everything on which the rows depend, but the GPU, driver, toolchain and commit of this process. A
            journal of others is refused.
        keys: the rows' keys, each once, in the order of the file.
        measure: yields the rows of the keys that it is given.
        line: words on a row, for its line of progress.
        content: content of the result file, of all rows in order.
        key: the key of a row; by default its field ``problem``.

    Returns:
        All rows in order.

    Raises:
        UsageError: the journal has other settings.
        RecordError: the disk refuses; finished rows are kept.
    """
    made = {**shared_conditions(), "commit": source_commit()}
    journal = Journal(out.with_name(out.name + ".jsonl"), {**settings, "made_with": made})
    written = False
    try:
        known = set(map(key, journal.entries))
        missing, begun = [one for one in keys if one not in known], time.perf_counter()
        for done, row in enumerate(measure(missing) if missing else (), 1):
            journal.append(row)
            left = (time.perf_counter() - begun) / done * (len(missing) - done)
            print(f"[{done}/{len(missing)}, {left:.0f} s left] {line(journal.entries[-1])}", flush=True)
        rows = sorted(journal.entries, key=lambda row: keys.index(key(row)))
        write_json(out, content(rows))
        written = True
        return rows
    finally:
        journal.close(done=written)
