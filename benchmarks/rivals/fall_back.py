"""The library's way where it has no kernel, as an entry of the clock: ours is what `outblas.matmul` runs there."""

from __future__ import annotations

from outblas.core.problem import Problem
from outblas.judge.fallback_entry import FallbackEntry
from outblas.records.library_row import LibraryRow


def fall_back(problem: Problem, row: LibraryRow | None) -> FallbackEntry:
    """Return torch.matmul, or the algorithm of cuBLASLt that a row names, as an entry.

    The faster of several rivals in the judged rounds would be a better figure than any user gets.

    Args:
        row: the library's row; None: the library does not list the problem.
    """
    entry = FallbackEntry(0)
    entry.name_algorithm(problem, row.fallback if row else "")
    return entry
