"""The section of a report that lists a tune run's intervals of M."""

from __future__ import annotations

from outblas.core.config import LAUNCHES
from outblas.publish.html.run_data import ReportedRun
from outblas.publish.html.shell import table
from outblas.publish.words import short_config
from outblas.records.library_interval import LibraryInterval
from outblas.records.library_row import LibraryChoice

_LAUNCH_HEADS = ("Without PDL", "With PDL", "Constant weights")


def intervals_section(run: ReportedRun) -> str:
    """Return the run's intervals as HTML, a row per interval; an empty text if it has none."""
    if not run.intervals:
        return ""
    lines = [
        (one.weight.key, f"{one.first}..{one.last}", *_choices(one), ", ".join(map(str, one.measured)))
        for one in run.intervals
    ]
    caption = "One kernel per launch option serves each M; speed-ups are the lowest of the measured M"
    found = table(caption, ("Weight", "M", *_LAUNCH_HEADS, "Proved at M"), lines)
    return f"<section aria-labelledby='intervals'><h2 id='intervals'>Intervals of M</h2>{found}</section>"


def _choices(one: LibraryInterval) -> list[str]:
    """Return for each launch option the kernel with its lowest speed-up, or what runs in its place."""
    baseline = "cuBLASLt " + one.row.fallback if one.row.fallback else "torch.matmul"
    return [baseline if c is None else _kernel(c) for c in map(one.row.choice, LAUNCHES)]


def _kernel(choice: LibraryChoice) -> str:
    return f"{short_config(choice.config)}, {choice.speedup:.3f}×"
