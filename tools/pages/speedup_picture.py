"""The published picture of the speed-ups: sorted, by kind of problem, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outblas.core.stats import geomean
from outblas.records.results import Result, Row
from outblas_lab.publish.drawing import SOFT, drawing
from outblas_lab.publish.palette import GREY, LAUNCH_COLOURS, ratio_ticks
from outblas_lab.publish.words import PDL_NAMES, date_words
from pages.card import PICTURE_SIZE, outer_ticks_within, picture

KINDS = ("launch", "memory", "compute")


@drawing(PICTURE_SIZE)
def speedup_svg(result: Result, rows: Sequence[Row]) -> str:
    """Return the sorted published speed-ups of `rows` as SVG text, a panel per kind of problem.

    Args:
        rows: rows of one layout, dtype, accumulator and mode.
    """
    from matplotlib.figure import Figure

    panels = {f"{kind}-bound": [r for r in rows if r["regime"].startswith(kind)] for kind in KINDS}
    panels["other"] = [r for r in rows if not r["regime"].startswith(KINDS)]
    curves = {label: _by_launch(found) for label, found in panels.items() if found}
    least, most = min(r["published"] for r in rows), max(r["published"] for r in rows)
    low, high = min(0.95, least) / 1.01, max(1.1, most)
    ticks = ratio_ticks(low, 1.2 * high)
    high = next((tick for tick in ticks if tick >= high), high)  # no curve leaves the last tick
    figure = Figure(figsize=(640 / 72, 480 / 72))
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.125, right=0.97, top=0.57, bottom=0.145, wspace=0.12)
    axes[0].set(yscale="log", ylim=(low, high), ylabel="speed-up, log scale")
    axes[0].set_yticks([], minor=True)
    axes[0].set_yticks([tick for tick in ticks if tick <= high], [f"{tick:g}×" for tick in ticks if tick <= high])
    for ax, (label, lines) in zip(axes, curves.items(), strict=True):
        _panel(ax, f"{label}, {len({(r['m'], r['n'], r['k']) for r in panels[label]})}", lines)
    figure.text(0.545, 0.03, "share of the problems, sorted by speed-up", ha="center", color=SOFT)
    head, whole = rows[0], _by_launch(rows)
    days = date_words("; ".join(str(date)[:10] for date in result.each("date")))
    count = len({(r["m"], r["n"], r["k"]) for r in rows})
    below = [
        f"{count:,} problems of {result.suite}, {head['layout']}, {head['dtype']}, {head['acc']} sums, {head['mode']}",
        f"{result.provenance['gpu']}, {days}",
        *(f"{PDL_NAMES[pdl]}: {_mean_in_words(values)}" for pdl, values in whole.items()),
    ]
    means = "; ".join(
        f"{label} {PDL_NAMES[pdl]}: {geomean(values):.3f}"
        for label, lines in curves.items()
        for pdl, values in lines.items()
    )
    description = f"{'. '.join(below)}. Geometric means: {means}."
    return picture(figure, "Speed-up over the fastest baseline", below, description, list(curves.values()))


def _by_launch(rows: Sequence[Row]) -> dict[bool, list[float]]:
    """Return launch option -> ascending speed-ups."""
    return {pdl: sorted(r["published"] for r in rows if r["pdl"] is pdl) for pdl in sorted({r["pdl"] for r in rows})}


def _mean_in_words(values: Sequence[float]) -> str:
    return f"geometric mean {geomean(values):.3f}×, from {values[0]:.3f}× to {values[-1]:.3f}×"


def _panel(ax: Any, title: str, lines: dict[bool, list[float]]) -> None:
    """Draw the curves of a kind of problem, and above them their means in their colours and order."""
    ax.axhline(1.0, color=GREY, linewidth=1.5, zorder=1.5)
    ax.grid(axis="x", visible=False)
    ax.set(xlim=(0, 100))
    outer_ticks_within(ax.set_xticks((0, 50, 100), ("0%", "50%", "100%")))
    ax.text(0, 1.06 + 0.1 * len(lines), title, transform=ax.transAxes)
    for place, (pdl, values) in enumerate(lines.items()):
        shares = [100 * (i + 0.5) / len(values) for i in range(len(values))]
        style = {"linestyle": "-" if pdl else ":", "color": LAUNCH_COLOURS[pdl]}
        ax.plot(shares, values, clip_on=False, gid=f"class-{'on' if pdl else 'off'}", **style)
        words = f"{geomean(values):.3f}× {PDL_NAMES[pdl]}"
        ax.text(0, 1.04 + 0.1 * place, words, transform=ax.transAxes, color=LAUNCH_COLOURS[pdl])
