"""The M that a run may decide, kept in its ``run.json``, so that the same command goes on once a library has some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.files import write_json
from outblas.core.weight import WeightRange, spans_of
from outblas.tune.intervals.range_search import RangesRequest


def joined_free(request: RangesRequest, file: Path, about: dict[str, Any]) -> tuple[RangesRequest, dict[str, Any]]:
    """Return a request in which the M of the run's earlier sessions are free, too, and the new content of run.json.

    The winners of an earlier session may be installed. So the library in use decides M that this run has to decide.

    Args:
        request: the ranges, with the M that are free today.
        file: the run's ``run.json``, which is written if the request leaves any M out.
        about: its content.

    Raises:
        RecordError: the recorded M are damaged, or the file cannot be written.
    """
    if not request.free:
        return request, about
    free = {
        asked.weight: sorted({*request.free[asked.weight], *_recorded(about, asked, file)})
        for asked in request.ranges
        if asked.weight in request.free
    }
    spans = {
        one.key: [list(span) for span in spans_of(free[one.weight])] for one in request.ranges if one.weight in free
    }
    about = {**about, "free": spans}
    write_json(file, about)
    return replace(request, free=free), about


def _recorded(about: Mapping[str, Any], asked: WeightRange, file: Path) -> list[int]:
    """Return the M of a range that were free in earlier sessions; an empty list for a new run."""
    try:
        spans = [(first, last) for first, last in about.get("free", {}).get(asked.key, [])]
        if all(asked.first <= first <= last <= asked.last for first, last in spans):
            return [m for first, last in spans for m in range(first, last + 1)]
    except (AttributeError, TypeError, ValueError):
        pass
    raise RecordError(f"{file} is damaged (free M of {asked.key})", "spans of M in the range", "choose another --run")
