"""The published picture of the speed-ups: sorted, by kind of problem, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.stats import geomean
from outblas.records.results import Result, Row
from outblas_lab.publish.drawing import SOFT, drawing, picture
from outblas_lab.publish.palette import GREY, LAUNCH_COLOURS, ratio_ticks
from outblas_lab.publish.words import PDL_NAMES

KINDS = ("launch", "memory", "compute")


@drawing()
def speedup_svg(result: Result, rows: Sequence[Row]) -> str:
    """Return the sorted published speed-ups of `rows` as SVG text, a panel per kind of problem.

    Args:
        rows: rows of one layout, dtype, accumulator and mode.
    """
    from matplotlib.figure import Figure

    panels = {f"{kind}-bound": [r for r in rows if r["regime"].startswith(kind)] for kind in KINDS}
    panels["other"] = [r for r in rows if not r["regime"].startswith(KINDS)]
    curves = {
        label: {
            pdl: sorted(r["published"] for r in found if r["pdl"] is pdl) for pdl in sorted({r["pdl"] for r in rows})
        }
        for label, found in panels.items()
        if found
    }
    low, high = min(0.95, *(r["published"] for r in rows)) / 1.01, max(1.1, *(r["published"] for r in rows)) * 1.02
    figure = Figure(figsize=(960 / 72, 400 / 72))
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.065, right=0.98, top=0.72, bottom=0.13, wspace=0.08)
    for ax, (label, lines) in zip(axes, curves.items(), strict=True):
        for pdl, values in lines.items():
            shares = [100 * (i + 0.5) / len(values) for i in range(len(values))]
            style = {"linestyle": "-" if pdl else ":", "color": LAUNCH_COLOURS[pdl]}
            ax.plot(shares, values, label=PDL_NAMES[pdl], clip_on=False, gid=f"class-{'on' if pdl else 'off'}", **style)
        ax.axhline(1.0, color=GREY, linewidth=1.5, zorder=1.5)
        ax.grid(axis="x", visible=False)
        ax.set(xlim=(0, 100), yscale="log", ylim=(low, high))
        for text, side in zip(
            ax.set_xticks((0, 50, 100), ("0%", "50%", "100%")), ("left", "center", "right"), strict=True
        ):
            text.label1.set_horizontalalignment(side)
        ax.set_yticks([], minor=True)
        ax.set_yticks(ratio_ticks(low, high), [f"{tick:g}×" for tick in ratio_ticks(low, high)])
        count = len({(r["m"], r["n"], r["k"]) for r in panels[label]})
        means = " / ".join(f"{geomean(values):.3f}×" for values in lines.values() if values)
        ax.text(0, 1.1, f"{label} ({count})", transform=ax.transAxes, size=13)
        ax.text(0, 1.03, f"geometric mean {means}", transform=ax.transAxes, color=SOFT)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="upper right", ncols=2, frameon=False, bbox_to_anchor=(0.98, 0.92)
    )
    figure.text(0.52, 0.02, "share of problems, sorted by speed-up", ha="center", color=SOFT)
    head = rows[0]
    title = "Speed-up over the best baseline: " + (
        f"{result.suite} {head['layout']}, {head['dtype']}, {head['acc']} accumulate"
    )
    where = f"{result.provenance['gpu']}, {head['mode']}, {result.provenance['date']}"
    means = "; ".join(
        f"{label} {PDL_NAMES[pdl]}: {geomean(values):.3f}"
        for label, lines in curves.items()
        for pdl, values in lines.items()
        if values
    )
    return picture(figure, title, where, f"Measured on {where}. Geometric means: {means}.", list(curves.values()))
