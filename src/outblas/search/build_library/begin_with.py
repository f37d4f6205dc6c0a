"""Tables and kernels that a build takes over from other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.library_tables import fill_fallbacks, replace_intervals, replace_weights, rows_of_table
from outblas.search.build_library.build_work import BuildFolder

#: Part of a library -> joins that of another library and its own, which goes first.
_JOINED = {"intervals": replace_intervals, "gates": replace_weights}


def copy_tables_from(work: BuildFolder, files: Sequence[Path]) -> None:
    """Give a directory the tables of other libraries that it lacks; of a problem the row of the first that has one.

    So it gets their intervals of tables whose intervals it lacks. Rows and intervals that the directory has stay. A
    table that was made with other kernel sources names their hash in its provenance; its bench in mode ``offline``
    proves its kernels with today's.

    Args:
        work: directory of the build, which must exist.
        files: library files.

    Raises:
        UsageError: the libraries are of different kinds of GPU.
    """
    found = [Library.load(file) for file in files]
    libraries = [work.load(), *found] if work.library.exists() else found
    if not libraries:
        return
    _check_one_gpu(libraries)
    rows: dict[Problem, LibraryRow] = {}
    tables: dict[str, Any] = {}
    for library in libraries:
        rows = {row.problem: row for row in library.rows} | rows
        tables = _named_kernels(library) | tables
    first = libraries[0]
    whole = _with_intervals_of(first, libraries[1:])
    if work.library.exists() and whole is first and tables.keys() == first.provenance["tables"].keys():
        return
    replace(whole, rows=tuple(rows.values()), provenance={**whole.provenance, "tables": tables}).save(work.library)


def _with_intervals_of(library: Library, others: Sequence[Library]) -> Library:
    """Return a library with the intervals and gates of other libraries for the tables whose it lacks."""
    for other, (kind, joined) in product(others, _JOINED.items()):
        known, found = library.provenance.get(kind, {}), other.provenance.get(kind, {})
        if found.keys() - known.keys():
            own: dict[str, Any] = {kind: joined(getattr(other, kind), getattr(library, kind))}
            library = replace(library, provenance={**library.provenance, kind: {**found, **known}}, **own)
    return library


def _named_kernels(library: Library) -> dict[str, Any]:
    """Return the provenance of a library's tables, each with the hash of its kernel sources if that is known."""
    sources = {"kernels": library.provenance["kernels"]} if library.provenance.get("kernels") else {}
    return {name: {**sources, **about} for name, about in library.provenance["tables"].items()}


def fill_from(work: BuildFolder, files: Sequence[Path], tables: Sequence[Table]) -> None:
    """Fill rows that fall back with the kernel of another library, once per table and other library.

    A row of work without a kernel for ``plain``, ``pdl`` or ``weights`` takes the other row's kernel for that launch
    option, if it has one. Kernels that work has stay. Each table is one printed line, e.g. ``fill
    grid1000:TN:fp16:fp32: 86 rows have a kernel where they had none``. The filled kernels are not chosen yet: the steps
    ``trial`` and ``choose`` must follow.

    Args:
        work: directory of the build; its library is saved.
        files: files ``library.json`` of other libraries, in the order in which they may fill.
        tables: tables whose rows are filled.

    Raises:
        UsageError: a library lacks these tables, or the libraries are of different kernels or kinds of GPU.
    """
    for file in files:
        library, other = work.load(), Library.load(file)
        parts = {table: (rows_of_table(library, table), rows_of_table(other, table)) for table in tables}
        _check_one_kind((library, other))
        source = {key: other.provenance[key] for key in ("date", "commit")}
        for table, (part, found) in parts.items():
            about = part.provenance
            done = about.get("filled", [])
            if source in [before["from"] for before in done]:
                continue
            rows, count = _filled(library, found)
            about = {**about, "filled": [*done, {"from": source, "rows": count}]}
            known = {**library.provenance["tables"], str(table): about}
            library = replace(library, rows=rows, provenance={**library.provenance, "tables": known})
            print(f"fill {table}: {count} rows have a kernel where they had none", flush=True)
        library.save(work.library)


def _check_one_kind(libraries: Sequence[Library]) -> None:
    _check_one_gpu(libraries)
    about = {library.provenance.get("kernels") for library in libraries}
    if len(about) > 1:
        raise UsageError(
            f"libraries of kernels {about}", "one kind of GPU and the same kernels", "leave the others out"
        )


def _check_one_gpu(libraries: Sequence[Library]) -> None:
    gpus = sorted({library.gpu for library in libraries})
    if len(gpus) > 1:
        raise UsageError(f"libraries of {', '.join(gpus)}", "one kind of GPU", "leave the others out")


def _filled(library: Library, other: Library) -> tuple[tuple[LibraryRow, ...], int]:
    rows = tuple(fill_fallbacks(row, found) if (found := other.row_of(row.problem)) else row for row in library.rows)
    return rows, sum(new != old for new, old in zip(rows, library.rows, strict=True))
