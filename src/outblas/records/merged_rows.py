"""Two rows of a problem as one: the better kernel of each launch option."""

from __future__ import annotations

from dataclasses import replace

from outblas.core.config import LAUNCHES
from outblas.records.library_row import LibraryChoice
from outblas.records.library_row import LibraryRow as LibraryRow


def merge_rows(old: LibraryRow, new: LibraryRow) -> LibraryRow:
    """Return, for each launch option, the kernel with the higher lower bound; ``old`` wins a tie.

    If any kernel changes, the baseline is that of ``new``. A row without a kernel loses to one with a kernel.
    """
    picks: dict[str, LibraryChoice | None] = {}
    for launch in LAUNCHES:
        a, b = old.choice(launch), new.choice(launch)
        picks[launch] = b if a is None or (b is not None and b.low > a.low) else a
    if picks["weights"] == picks["pdl"]:
        picks["weights"] = None
    if all(getattr(old, launch) == pick for launch, pick in picks.items()):
        return old
    row = replace(new, plain=picks["plain"], pdl=picks["pdl"], weights=picks["weights"])
    # Second winners were timed against the plain choice of their row, so they stay with it.
    return without_second_winners(row) if picks["plain"] != new.plain else row


def without_second_winners(row: LibraryRow) -> LibraryRow:
    """Return a row whose plain choice holds under every workload."""
    return replace(row, cold=None, single=None)
