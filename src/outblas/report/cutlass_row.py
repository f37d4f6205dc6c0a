"""CUTLASS as a peer in the published table's notes, from what ``benchmarks/cutlass_peer.py`` left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.errors import RecordError
from outblas.report.kept import note_of
from outblas.stats import geomean

FORMAT = "outblas-cutlass-1"
#: Its name beside the result files.
FILE = "cutlass_peer.json"


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means over problems: ``cutlass_over_baseline``, ``ours_over_baseline`` (1 where the library falls
    back), ``ours_over_cutlass``. Only problems on which an instance of CUTLASS passed count, the same in all three.

    Raises:
        RecordError: there is none.
    """
    both = [row for row in rows if row["cutlass"] is not None]
    if not both:
        raise RecordError(
            "no problem on which CUTLASS passed", "the result of benchmarks/cutlass_peer.py", "measure again"
        )
    return {
        "cutlass_over_baseline": geomean(row["cutlass"]["ratio"] for row in both),
        "ours_over_baseline": geomean(row["ours"]["ratio"] if row["ours"] else 1.0 for row in both),
        "ours_over_cutlass": geomean(row["ours_over_cutlass"]["ratio"] for row in both),
    }


def notes_of_cutlass(directory: Path) -> list[str]:
    """A line of Markdown for the table's notes; none where CUTLASS was not measured.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(Path(directory) / FILE, FORMAT, "benchmarks/cutlass_peer.py", _line)


def _line(data: dict[str, Any]) -> str:
    rows, instances = data["rows"], len(data["instances"])
    found = means(rows)
    both = [row for row in rows if row["cutlass"] is not None]
    ahead = sum(row["ours_over_cutlass"]["low"] > 1.0 for row in both)
    return (
        f"- CUTLASS 3.x, the fastest of {instances} kernels of its collective builder on each of {len(both)} problems "
        f"of grid1000 (TN, fp16/fp32, offline, without PDL): {found['cutlass_over_baseline']:.3f}× the fastest "
        f"baseline; ours, as the library names it, {found['ours_over_baseline']:.3f}× there and "
        f"{found['ours_over_cutlass']:.3f}× CUTLASS, surely ahead on {ahead}"
    )
