"""How long a library took to make from nothing, for the published table's notes: `outblas build-library` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outblas.records.retune_record import FILE, FORMAT, seconds_by_step
from outblas.report.kept import note_of
from outblas.suites import Table


def notes_of_retune(directory: Path) -> list[str]:
    """A line of Markdown for the table's notes; none where no library was made from nothing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(Path(directory) / FILE, FORMAT, "outblas build-library --from-nothing", _line)


def _line(data: dict[str, Any]) -> str:
    steps = seconds_by_step(data["seconds"])
    tables = (Table.parse(name) for name in data["tables"])
    names = " and ".join(f"{t.suite} {t.layout} {t.dtype}/{t.acc}" for t in tables)
    each = ", ".join(f"{step} {seconds / 60:.1f}" for step, seconds in steps.items())
    gpu = data["provenance"]["gpu"]
    return f"- {names}, tuned from nothing: {sum(steps.values()) / 60:.1f} minutes of one {gpu} ({each})"
