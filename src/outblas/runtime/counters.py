"""The counters that an evaluation may carry by Nsight Compute: their names, units, and the metric behind each.

``Evaluation.counters`` maps these names to numbers; a counter that ncu could not tell is absent. What they are is said
in :data:`COUNTERS` only, which ``outblas list counters`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outblas.core.errors import RecordError
from outblas.runtime.ncu import FIGURE_METRICS, MAIN_STALLS, STALL_REASONS, ProfiledLaunch, stall_metric

#: What begins the names of the reasons why warps do not issue.
STALL_PREFIX = "stall_"


@dataclass(frozen=True)
class Counter:
    """One counter.

    Attributes:
        name: in ``Evaluation.counters``. unit: of its value.
        metrics: ncu's names of it; the first that ncu returns counts.
        scale: ncu's value (percent, or a plain count) times this is the counter's.
        meaning: in words.
    """

    name: str
    unit: str
    metrics: tuple[str, ...]
    scale: float
    meaning: str


def _share(name: str, figure: str, meaning: str) -> Counter:
    return Counter(name, "0 to 1", FIGURE_METRICS[figure], 0.01, meaning)


def _count(name: str, unit: str, meaning: str) -> Counter:
    return Counter(name, unit, FIGURE_METRICS[name], 1.0, meaning)


#: Every counter, in the order in which they are shown.
COUNTERS: tuple[Counter, ...] = (
    _share("tensor_pipe", "tensor_pct", "cycles in which the tensor pipe is busy, of those in which an SM is active"),
    _share("dram", "dram_pct", "throughput of HBM, of what it could sustain"),
    _share("l2_hit_rate", "l2_hit_pct", "sectors asked of L2 that were in it"),
    _share("occupancy", "occupancy_pct", "warps resident on an active SM, of the most there may be"),
    _count("instructions", "warp instructions", "executed, all SMs"),
    _count("cycles", "SM cycles", "elapsed, the slowest SM"),
    _count("dram_read_bytes", "bytes", "read from HBM"),
    _count("dram_write_bytes", "bytes", "written to HBM"),
    _count("l2_bytes", "bytes", "all traffic of L2"),
    *(
        Counter(
            STALL_PREFIX + reason, "warps per instruction issued", (stall_metric(reason),), 1.0, f"that wait: {reason}"
        )
        for reason in STALL_REASONS
    ),
)
PROFILED_COUNTERS: tuple[str, ...] = tuple(counter.name for counter in COUNTERS)


def counters_of(launch: ProfiledLaunch) -> dict[str, float]:
    """The counters of a profiled kernel by name, those that ncu told.

    Raises:
        RecordError: it told none.
    """
    found: dict[str, float] = {}
    for counter in COUNTERS:
        value = next((launch.metrics[metric] for metric in counter.metrics if metric in launch.metrics), None)
        if value is not None:
            found[counter.name] = value * counter.scale
    if not found:
        raise RecordError(
            f"ncu told no counter of {launch.kernel}", f"any of {', '.join(PROFILED_COUNTERS[:4])}", "profile again"
        )
    return found


def main_stalls(counters: Mapping[str, float], most: int = MAIN_STALLS) -> list[tuple[str, float]]:
    """(reason, warps stalled for it per instruction issued) of the worst ``most``, worst first."""
    stalls = {
        name.removeprefix(STALL_PREFIX): value for name, value in counters.items() if name.startswith(STALL_PREFIX)
    }
    worst = sorted((reason for reason in stalls if stalls[reason] > 0), key=lambda reason: (-stalls[reason], reason))
    return [(reason, stalls[reason]) for reason in worst[:most]]


#: Columns of a table of counters, after those that say whose they are.
COUNTER_COLUMNS = ("tensor pipe", "HBM", "L2 hits", "occupancy", "instructions, M", "cycles, k", "main stalls")


def counter_cells(counters: Mapping[str, float]) -> Sequence[str]:
    """A line of such a table: text for each of :data:`COUNTER_COLUMNS`, a dash for what is not known."""

    def text(name: str, scale: float, form: str) -> str:
        return form.format(counters[name] * scale) if name in counters else "–"

    percentages = [text(name, 100.0, "{:.1f}%") for name in ("tensor_pipe", "dram", "l2_hit_rate", "occupancy")]
    counts = [text("instructions", 1e-6, "{:.2f}"), text("cycles", 1e-3, "{:.1f}")]
    stalls = ", ".join(f"{reason} {ratio:.2f}" for reason, ratio in main_stalls(counters))
    return [*percentages, *counts, stalls or "–"]
