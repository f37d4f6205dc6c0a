"""The kernels of a library that were proved with the sources and the compiler of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.config import LAUNCHES, KernelKind, kernel_kind
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.kernels.kernel_hash import kernels_sha
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

    A table's provenance names the hash of its sources as ``kernels``, and of those of a later proof in ``proved``.
    Without the first, that of the library counts. A library without any is of today's.

    Args:
        library: the library; its provenance has ``tables``.
    """
    common = library.provenance.get("kernels") or kernels_sha()
    return _not_of(library.provenance["tables"], {"kernels": kernels_sha()}, {"kernels": common})


def unproved_intervals(library: Library) -> list[Table]:
    """Return the tables whose intervals a library has of other kernel sources than today's.

    Args:
        library: the library; its provenance names the sources of each table's intervals, and of a later proof.
    """
    return _not_of(library.provenance.get("intervals", {}), {"kernels": kernels_sha()}, {})


def _not_of(parts: Mapping[str, Any], today: Mapping[str, Any], common: Mapping[str, Any]) -> list[Table]:
    """Return the tables that were neither searched nor proved later with ``today``'s sources, or sources and compiler.

    ``common`` has what a table's own provenance does not say.
    """
    return [Table.parse(name) for name, about in parts.items() if not _is_of(about, today, common)]


def _is_of(about: Mapping[str, Any], today: Mapping[str, Any], common: Mapping[str, Any]) -> bool:
    searched = {key: value or common.get(key) for key, value in _searched_by(about).items()}
    # Earlier releases did not note the compiler of a later proof. Then it counts as that of the search.
    if "proved" in about and {**searched, **about["proved"]}.items() >= today.items():
        return True
    earlier = about.get("earlier")  # of the weights that this search did not make
    return searched.items() >= today.items() and (earlier is None or _is_of(earlier, today, common))


def _searched_by(about: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the sources and the compiler of a search, in the form of :func:`built_by`."""
    return {"kernels": about.get("kernels"), "nvrtc": (about.get("toolchain") or {}).get("nvrtc")}


def proved_problems(library: Library) -> set[Problem]:
    """Return the problems of a library's tables whose kernels were proved with today's sources and compiler.

    A problem of two tables counts if both were. What a table does not say of its search, the library's provenance says.
    """
    return _proved_problems(library.provenance["tables"], _searched_by(library.provenance))


def proved_kinds(library: Library) -> frozenset[KernelKind]:
    """Return the kinds of a library's kernels that passed every gate with today's sources and compiler.

    A search on the same kind of GPU need not prove them in full again. Each table's rows and intervals count by their
    own provenance, which must name the sources and the compiler.
    """
    problems = _proved_problems(library.provenance.get("tables", {}), {})
    weights = set(map(Weight.of, _proved_problems(library.provenance.get("intervals", {}), {})))
    rows = [row for row in library.rows if row.problem in problems]
    rows += [one.row for one in library.intervals if one.weight in weights]
    found = ((row.problem, row.choice(launch)) for row in rows for launch in LAUNCHES)
    return frozenset(kernel_kind(problem, choice.config) for problem, choice in found if choice is not None)


def _proved_problems(parts: Mapping[str, Any], common: Mapping[str, Any]) -> set[Problem]:
    """Return the problems of the tables that were proved with today's sources and compiler, and of no other table."""
    today, unproved = built_by(), set[Problem]()
    if not today["nvrtc"]:
        return unproved
    for table in _not_of(parts, today, common):
        unproved.update(table.problems())
    return {problem for name in parts for problem in Table.parse(name).problems()} - unproved
