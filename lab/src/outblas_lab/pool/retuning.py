"""The record of how long a whole library took to make. The notes of the published table cite it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.config import LAUNCHES
from outblas.records.library import Library
from outblas.records.results import PROVENANCE_FIELDS

RETUNE_FORMAT = "outblas-retune-1"
#: File name of the record, beside the result files.
RETUNE_FILE = "retune.json"


def retune_record(library: Library, seconds_of_making: dict[str, float]) -> dict[str, Any]:
    """Return the record of a library that was tuned from nothing.

    Args:
        seconds_of_making: job (e.g. ``"tune grid1000:TN:fp16:fp32"``) -> seconds, start-up and shut-down included.

    Returns:
        Provenance, seconds, the tables' provenance, and ``by_own_timing``. That one has, per launch option, the number
            of problems, the geometric mean of the searches' own speed-ups, and the number of fall-backs. These
            speed-ups have selection bias: they are no bench.
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
    """Return step -> total seconds of its jobs, whose names begin with it; in the order of first use.

    Example: ``{"tune A": 2.0, "bench A": 1.0, "tune B": 3.0}`` gives ``{"tune": 5.0, "bench": 1.0}``.
    """
    steps: dict[str, float] = {}
    for job, spent in seconds.items():
        step = job.split()[0]
        steps[step] = steps.get(step, 0.0) + spent
    return steps
