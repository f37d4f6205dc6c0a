"""The hardware counters that an evaluation may carry: names, units, and the Nsight Compute metric behind each.

``Evaluation.counters`` maps these names to numbers. A counter that ncu did not report is absent. ``outblas list
counters`` prints :data:`COUNTERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outblas.core.errors import RecordError
from outblas_lab.pool.ncu import FIGURE_METRICS, MAIN_STALLS, STALL_METRIC, STALL_REASONS, ProfiledLaunch

#: Prefix of the counters of stalled warps.
STALL_PREFIX = "stall_"


@dataclass(frozen=True)
class Counter:
    """A hardware counter, one of :data:`COUNTERS`.

    Attributes:
        unit: unit of its value, e.g. ``0 to 1``, ``bytes`` or ``SM cycles``.
        metrics: ncu's names; the first one that ncu reports counts.
        scale: factor from ncu's value (percent or a plain count) to the counter's value.
    """

    name: str
    unit: str
    metrics: tuple[str, ...]
    scale: float
    meaning: str


def _share(name: str, figure: str, meaning: str) -> Counter:
    """Return a counter from 0 to 1 that ncu reports in percent; ``figure`` is its key in FIGURE_METRICS."""
    return Counter(name, "0 to 1", FIGURE_METRICS[figure], 0.01, meaning)


def _count(name: str, unit: str, meaning: str) -> Counter:
    """Return a counter that is a plain number in ncu."""
    return Counter(name, unit, FIGURE_METRICS[name], 1.0, meaning)


#: Every counter, in the order of display.
COUNTERS: tuple[Counter, ...] = (
    _share("tensor_pipe", "tensor_pct", "busy cycles of the tensor pipe, as a share of the active cycles of an SM"),
    _share("dram", "dram_pct", "HBM throughput, as a share of the sustainable peak"),
    _share("l2_hit_rate", "l2_hit_pct", "requested L2 sectors that hit, as a share of all"),
    _share("occupancy", "occupancy_pct", "resident warps of an active SM, as a share of the maximum"),
    _count("instructions", "warp instructions", "executed on all SMs"),
    _count("cycles", "SM cycles", "elapsed on the slowest SM"),
    _count("dram_read_bytes", "bytes", "read from HBM"),
    _count("dram_write_bytes", "bytes", "written to HBM"),
    _count("l2_bytes", "bytes", "total L2 traffic"),
    *(
        Counter(
            STALL_PREFIX + reason,
            "warps per instruction issued",
            (STALL_METRIC.format(reason),),
            1.0,
            f"stalled: {reason}",
        )
        for reason in STALL_REASONS
    ),
)
PROFILED_COUNTERS: tuple[str, ...] = tuple(counter.name for counter in COUNTERS)


def counters_of(launch: ProfiledLaunch) -> dict[str, float]:
    """Return name -> value of the counters that ncu reported for a profiled kernel. Others are absent.

    Raises:
        RecordError: ncu reported none of them.
    """
    found: dict[str, float] = {}
    for counter in COUNTERS:
        value = next((launch.metrics[metric] for metric in counter.metrics if metric in launch.metrics), None)
        if value is not None:
            found[counter.name] = value * counter.scale
    if not found:
        expected = f"at least one counter, e.g. {', '.join(PROFILED_COUNTERS[:4])}"
        raise RecordError(f"ncu reported no counters for {launch.kernel}", expected, "profile again")
    return found


def counters_of_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> value of the counters in a result of :func:`outblas_lab.pool.ncu.figures`. Others are absent.

    Args:
        figures: plain name -> number or None, and ``stalls``: [reason, stalled warps per issued instruction].
    """
    found = {STALL_PREFIX + str(reason): float(value) for reason, value in figures.get("stalls", ())}
    for figure, metrics in FIGURE_METRICS.items():
        counter = next((one for one in COUNTERS if one.metrics == metrics), None)
        if counter is not None and figures.get(figure) is not None:
            found[counter.name] = figures[figure] * counter.scale
    return found


def main_stalls(counters: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (reason, stalled warps per issued instruction) of the worst stalls, worst first; equal ones by name.

    Args:
        counters: name -> value, e.g. ``Evaluation.counters``. Names with the prefix ``stall_`` count; a reason is such
            a name without the prefix.
            Reasons with the value 0 are left out.
    """
    stalls = {
        name.removeprefix(STALL_PREFIX): value for name, value in counters.items() if name.startswith(STALL_PREFIX)
    }
    worst = sorted((reason for reason in stalls if stalls[reason] > 0), key=lambda reason: (-stalls[reason], reason))
    return [(reason, stalls[reason]) for reason in worst[:MAIN_STALLS]]


#: Columns of a table of counters, after the columns that identify the kernel.
COUNTER_COLUMNS = ("tensor pipe", "HBM", "L2 hits", "occupancy", "instructions, M", "cycles, k", "main stalls")


def counter_cells(counters: Mapping[str, float]) -> Sequence[str]:
    """Return the texts of :data:`COUNTER_COLUMNS` for one kernel; an en dash stands for an unknown counter.

    Shares are like ``93.1%``, instructions ``1.25`` (M), cycles ``80.3`` (k), and stalls ``wait 0.50, barrier 0.25``.
    Example: ``counter_cells({"tensor_pipe": 0.931})`` returns ``["93.1%", "–", "–", "–", "–", "–", "–"]``.
    """

    def text(name: str, scale: float, form: str) -> str:
        return form.format(counters[name] * scale) if name in counters else "–"

    percentages = [text(name, 100.0, "{:.1f}%") for name in ("tensor_pipe", "dram", "l2_hit_rate", "occupancy")]
    counts = [text("instructions", 1e-6, "{:.2f}"), text("cycles", 1e-3, "{:.1f}")]
    stalls = ", ".join(f"{reason} {ratio:.2f}" for reason, ratio in main_stalls(counters))
    return [*percentages, *counts, stalls or "–"]
