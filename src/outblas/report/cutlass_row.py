"""CUTLASS as a peer in the published table's notes, from what ``scripts/cutlass_peer.py`` left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.errors import RecordError
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
        raise _refused("no problem on which CUTLASS passed")
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
    path = Path(directory) / FILE
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _refused(f"{path} is not of format {FORMAT}")
        rows, instances = data["rows"], len(data["instances"])
        found = means(rows)
        ahead = sum(1 for row in rows if row["cutlass"] is not None and row["ours_over_cutlass"]["low"] > 1.0)
        count = sum(1 for row in rows if row["cutlass"] is not None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{path} cannot be read ({error})") from error
    return [
        f"- CUTLASS 3.x, the fastest of {instances} kernels of its collective builder on each of {count} problems of "
        f"grid1000 (TN, fp16/fp32, offline, without PDL): {found['cutlass_over_baseline']:.3f}× the fastest baseline; "
        f"ours, as the library names it, {found['ours_over_baseline']:.3f}× there and "
        f"{found['ours_over_cutlass']:.3f}× CUTLASS, surely ahead on {ahead}"
    ]


def _refused(wrong: str) -> RecordError:
    return RecordError(wrong, "the result of scripts/cutlass_peer.py", "measure again, or restore the committed file")
