"""The summary of all result files. It is computed from the files alone; every published figure is one of its rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from outblas.records.result_rows import Row
from outblas.records.results import Result, bench_files, read_result
from outblas_lab.pool.averages import best_of_layouts, extended_figures, figures_by_start, figures_of

_T = TypeVar("_T")
#: Columns that identify a table within a suite. Rows that agree in them may be averaged together.
TABLE_KEY = ("layout", "dtype", "acc", "mode", "pdl", "early")


def summarise(path: str | os.PathLike[str]) -> list[Row]:
    """Return the summary rows of one result file: one per value of :data:`TABLE_KEY`, sorted by it.

    Raises:
        RecordError: as :func:`outblas.records.results.read_result`.
    """
    return summarise_result(read_result(path))


def summarise_result(result: Result) -> list[Row]:
    """Return the rows of :func:`summarise` for a file that is already read."""
    groups = _groups(result)
    return [_summary_row([result], key, groups[key]) for key in sorted(groups)]


def best_rows(results: Iterable[Result]) -> list[Row]:
    """Return summary rows of layout ``best``, for every table that has most problems in both TN and NN.

    They have no ``interval``: their rows join medians of two benches.

    Server mode is left out, because the host dominates its latencies. If several files have the same table, the one
    with most rows counts.
    """
    tables: dict[tuple[Any, ...], dict[str, tuple[Result, list[Row]]]] = {}
    for result in results:
        for (layout, *rest), rows in _groups(result).items():
            known = tables.setdefault((result.suite, *rest), {})
            if layout not in known or len(rows) > len(known[layout][1]):
                known[layout] = (result, rows)
    found = []
    for (_, *kind), layouts in sorted(tables.items()):
        if layouts.keys() >= {"TN", "NN"} and "server" not in kind:
            (tn, tn_rows), (nn, nn_rows) = layouts["TN"], layouts["NN"]
            rows = best_of_layouts(tn_rows, nn_rows)
            if 2 * len(rows) > max(len(tn_rows), len(nn_rows)):  # else each layout drew shapes of its own
                sources = [tn] if tn.path == nn.path else [tn, nn]
                starts = min(figures_by_start(each, of.starts)["starts"] for of, each in layouts.values())
                found.append({**_summary_row(sources, ("best", *kind), rows), "starts": starts})
    return found


def _groups(result: Result) -> dict[tuple[Any, ...], list[Row]]:
    """Return :data:`TABLE_KEY` values -> rows that may be averaged together."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in result.rows:
        groups.setdefault(tuple(row[c] for c in TABLE_KEY), []).append(row)
    return groups


def _summary_row(sources: Sequence[Result], key: tuple[Any, ...], rows: list[Row]) -> Row:
    """Return a summary row. If files or starts were joined, differing values of a field are joined by ``; ``."""

    def joined(field: str) -> Any:
        values = [value for source in sources for value in source.each(field)]
        return values[0] if all(v == values[0] for v in values) else "; ".join(dict.fromkeys(map(str, values)))

    return {
        "suite": sources[0].suite,
        **dict(zip(TABLE_KEY, key, strict=True)),
        **figures_of(rows),
        "file": "; ".join(source.path.name for source in sources),
        **{field: joined(field) for field in ("gpu", "driver", "toolchain", "date", "commit")},
        **extended_figures(rows, sources[0].suite),
        **figures_by_start(rows, sources[0].starts),
    }


def summary_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Return the summary rows of every result file of a directory, by file name, then those of :func:`best_rows`.

    Raises:
        RecordError: no result file, or one that cannot be read.
    """
    return rows_of_results([read_result(path) for path in bench_files(directory)])


def rows_of_results(results: Sequence[Result]) -> list[Row]:
    """Return the rows of :func:`summary_rows` for files that are already read, in their order."""
    return [row for result in results for row in summarise_result(result)] + best_rows(results)
