"""How long a library took to make from nothing: the record of it, which the published table's notes cite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.config import LAUNCHES
from outblas.records.library import Library
from outblas.records.results import PROVENANCE_FIELDS

RETUNE_FORMAT = "outblas-retune-1"
#: Its name beside the result files.
RETUNE_FILE = "retune.json"


def retune_record(library: Library, seconds_of_making: dict[str, float]) -> dict[str, Any]:
    """What is kept of a library that was made from nothing.

    Args:
        seconds_of_making: of every job that made it (``"tune grid1000:TN:fp16:fp32"``), stops and starts included.

    Returns:
        Its provenance, the seconds, and the tables' provenance; ``by_own_timing`` of all rows: geometric mean of the
        speed-ups that the searches measured (with selection's bias: no bench) and rows that fall back.
    """
    return {
        "format": RETUNE_FORMAT,
        "provenance": {key: library.provenance[key] for key in PROVENANCE_FIELDS if key in library.provenance},
        "kernels": library.provenance.get("kernels"),
        "seconds": seconds_of_making,
        "tables": library.provenance["tables"],
        "by_own_timing": {
            launch: {
                "problems": len(library.rows),
                "geomean": round(library.geomean(launch), 4),
                "fallbacks": library.fallbacks(launch),
            }
            for launch in LAUNCHES
        },
    }


def seconds_by_step(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of all jobs of a step, the first word of a job's name, in the order in which steps are first named."""
    steps: dict[str, float] = {}
    for job, spent in seconds.items():
        step = job.split()[0]
        steps[step] = steps.get(step, 0.0) + spent
    return steps
