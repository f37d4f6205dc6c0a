"""How long a library took to make from nothing, in the published table's notes: ``scripts/regenerate.py`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outblas.config import LAUNCHES
from outblas.errors import RecordError, UsageError
from outblas.library import Library
from outblas.results import PROVENANCE
from outblas.suites import Table

FORMAT = "outblas-retune-1"
#: Its name beside the result files.
FILE = "retune.json"


def retune_record(library: Library, seconds_of_making: dict[str, float]) -> dict[str, Any]:
    """What is kept of a library that was made from nothing.

    Args:
        seconds_of_making: of every job that made it (``"tune grid1000:TN:fp16:fp32"``), stops and starts included.

    Returns:
        Its provenance, the seconds, and the tables' provenance; ``by_own_timing`` of all rows: geometric mean of the
        speed-ups that the searches measured (with selection's bias: no bench) and rows that fall back.
    """
    return {
        "format": FORMAT,
        "provenance": {key: library.provenance[key] for key in PROVENANCE if key in library.provenance},
        "kernels": library.provenance.get("kernels"),
        "seconds": seconds_of_making,
        "tables": library.provenance["tables"],
        "by_own_timing": {
            launch: {
                "problems": len(library.rows),
                "geomean": round(library.geomean(launch), 4),
                "fallbacks": sum(row.choice(launch) is None for row in library.rows),
            }
            for launch in LAUNCHES
        },
    }


def notes_of_retune(directory: Path) -> list[str]:
    """A line of Markdown for the table's notes; none where no library was made from nothing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    path = Path(directory) / FILE
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _refused(f"{path} is not of format {FORMAT}")
        seconds, steps = data["seconds"], dict[str, float]()
        for job, spent in seconds.items():
            step = job.split()[0]
            steps[step] = steps.get(step, 0.0) + spent / 60
        tables, gpu = [Table.parse(name) for name in data["tables"]], data["provenance"]["gpu"]
        each = ", ".join(f"{step} {minutes:.1f}" for step, minutes in steps.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise _refused(f"{path} cannot be read ({error})") from error
    names = " and ".join(f"{t.suite} {t.layout} {t.dtype}/{t.acc}" for t in tables)
    return [f"- {names}, tuned from nothing: {sum(steps.values()):.1f} minutes of one {gpu} ({each})"]


def _refused(wrong: str) -> RecordError:
    return RecordError(wrong, "what scripts/regenerate.py --from-nothing writes", "restore the committed file")
