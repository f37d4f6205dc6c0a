"""The kernels of a library that were proved with the sources and the compiler of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.config import LAUNCHES
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import KernelKind, kernel_kind
from outblas.records.library import Library
from outblas.records.provenance import toolchain


def built_by() -> dict[str, str | None]:
    """Return ``{"kernels": HASH, "nvrtc": VERSION}``: equal values give equal cubins.

    HASH is the SHA-256 of the kernel sources, 64 hex digits. VERSION is that of the compiler, e.g.
    ``13.0 (wheel 13.0.88)``, or None if it is not installed.
    """
    return {"kernels": kernels_sha(), "nvrtc": toolchain()["nvrtc"]}


def unproved_tables(library: Library) -> list[Table]:
    """Return the tables of a library whose kernels were proved with other sources than today's.

    A table's provenance names the hash of its sources as ``kernels``, and of those of a later proof as ``proved``.
    Without the first, that of the library counts. A library without any is of today's.

    Args:
        library: the library; its provenance has ``tables``.
    """
    return _of_other_sources(library.provenance["tables"], library.provenance.get("kernels") or kernels_sha())


def unproved_intervals(library: Library) -> list[Table]:
    """Return the tables whose intervals a library has of other kernel sources than today's.

    Args:
        library: the library; its provenance names the sources of each table's intervals, and of a later proof.
    """
    return _of_other_sources(library.provenance.get("intervals", {}), "")


def _of_other_sources(parts: Mapping[str, Any], common: str) -> list[Table]:
    """Return the tables whose provenance names today's sources neither as ``kernels``, or ``common``, nor as proved."""
    today = kernels_sha()
    sources = {
        name: (about.get("kernels", common), about.get("proved", {}).get("kernels")) for name, about in parts.items()
    }
    return [Table.parse(name) for name, known in sources.items() if today not in known]


def proved_kinds(library: Library) -> frozenset[KernelKind]:
    """Return the kinds of a library's kernels that passed every gate with today's sources and compiler.

    A search on the same kind of GPU need not prove them in full again. Each table's rows and intervals count by their
    own provenance, which must name the sources and the compiler.

    Args:
        library: the library.
    """
    problems = _proved_problems(library.provenance.get("tables", {}))
    weights = set(map(Weight.of, _proved_problems(library.provenance.get("intervals", {}))))
    rows = [row for row in library.rows if row.problem in problems]
    rows += [one.row for one in library.intervals if one.weight in weights]
    found = ((row.problem, row.choice(launch)) for row in rows for launch in LAUNCHES)
    return frozenset(kernel_kind(problem, choice.config) for problem, choice in found if choice is not None)


def _proved_problems(parts: Mapping[str, Any]) -> set[Problem]:
    """Return the problems of the tables that were proved with today's sources and compiler, and of no other table."""
    compiler, others = toolchain()["nvrtc"], {str(table) for table in _of_other_sources(parts, "")}
    proved, unproved = set[Problem](), set[Problem]()
    for name, about in parts.items():
        is_of_today = compiler and name not in others and (about.get("toolchain") or {}).get("nvrtc") == compiler
        (proved if is_of_today else unproved).update(Table.parse(name).problems())
    return proved - unproved
