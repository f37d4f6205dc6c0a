"""Charts as inline SVG that needs no library: axes, series and the HTML of a figure.

The SVG has no text. It is stretched to the room of the page, and its lines keep their width. Tick labels are HTML, so
that they are legible at every width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

#: Side of the SVG's own coordinate system, in which positions are written with one decimal.
SIDE = 1000


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: quantity and unit.
        low: value at the start of the axis.
        high: value at its end.
        ticks: (value, label) pairs; an empty label draws the grid line alone.
        log: a logarithmic scale; `low` and `high` are then above zero.
        grid: draw a grid line per tick.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    log: bool = False
    grid: bool = True

    def at(self, value: float) -> float:
        """Return the place of a value along the axis, from 0 to 1 within its range, by logarithms if ``log``.

        Values out of the range give less than 0 or more than 1. Example: 5 on a linear axis from 0 to 10 gives 0.5.
        """
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Series:
    """A set of values in a chart.

    Attributes:
        name: text of the legend.
        kind: shape of the marks. `steps` is a line of horizontal and vertical pieces. `bars` and `band` reach from
            `base` to `y`. `dots` are filled, `rings` are hollow.
        colour: a CSS colour.
        x: values along the horizontal axis.
        y: values along the vertical axis; a None in a line starts a new piece.
        base: lower ends, for `bars` and `band`.
        bar_width: width of a bar in units of the horizontal axis.
        tips: a text per value, shown under the pointer.
        rows: numbers of the group's rows, whose texts the page's script writes; in place of `tips`.
        size: width of a line or diameter of a mark, in pixels.
        dash: dashes of a line, in pixels.
        opacity: from 0 to 1.
        shown: drawn before the reader chooses.
        named: part of the legend.
    """

    name: str
    kind: Literal["line", "steps", "dots", "rings", "bars", "band"]
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]
    base: Sequence[float] = ()
    bar_width: float = 0.0
    tips: Sequence[str] = ()
    rows: Sequence[int] = ()
    size: float = 2.5
    dash: str = ""
    opacity: float = 1.0
    shown: bool = True
    named: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart: two axes and series, drawn in their order.

    Attributes:
        x: horizontal axis.
        y: vertical axis.
        series: sets of values.
        marked_x: place of a vertical reference line, or None.
        marked_y: place of a horizontal reference line, or None.
        dotted_y: place of a dotted horizontal reference line, or None.
        labels: (x, y, text) of texts inside the chart.
    """

    x: Axis
    y: Axis
    series: Sequence[Series]
    marked_x: float | None = None
    marked_y: float | None = None
    dotted_y: float | None = None
    labels: Sequence[tuple[float, float, str]] = ()

    def payload(self) -> dict[str, Any]:
        """Return the part of the chart that the page's script reads: texts under the pointer, by series.

        It is ``{"series": [{"name": ..., "tips": [...], "rows": [...]}, ...]}``.
        """
        return {"series": [{"name": s.name, "tips": list(s.tips), "rows": list(s.rows)} for s in self.series]}


def chart_html(chart: Chart, index: int, name: str, title: str, note: str) -> str:
    """Return a figure with its legend, axes, SVG and caption, as HTML with the id ``NAME-INDEX``.

    Args:
        chart: axes and series.
        index: number of the group whose rows the chart shows.
        name: name of the figure, unique in its group.
        title: first words of the caption, plain text without a full stop, which is added.
        note: the rest of the caption, plain text.
    """
    x_labels = "".join(
        f"<span class='xt' style='left:{100 * chart.x.at(v):.2f}%'>{escape(text)}</span>"
        for v, text in chart.x.ticks
        if text
    )
    y_labels = "".join(
        f"<span class='yt' style='top:{100 - 100 * chart.y.at(v):.2f}%'>{escape(text)}</span>"
        for v, text in chart.y.ticks
        if text
    )
    inside = "".join(
        f"<span class='lt' style='left:{100 * chart.x.at(x):.2f}%;top:{100 - 100 * chart.y.at(y):.2f}%'>"
        f"{escape(text)}</span>"
        for x, y, text in chart.labels
    )
    return (
        f"<figure class='chart {name}' id='{name}-{index}'>{_legend(chart.series)}"
        f"<div class='yaxis'>{escape(chart.y.title)}</div>"
        f"<div class='plot' data-group='{index}' data-figure-name='{name}'>{svg(chart, title)}"
        f"{y_labels}{x_labels}{inside}</div><div class='xaxis'>{escape(chart.x.title)}</div>"
        f"<figcaption><b>{escape(title)}.</b> {escape(note)}</figcaption></figure>"
    )


def svg(chart: Chart, title: str) -> str:
    """Return the SVG of a chart: grid, reference lines and a group per series."""
    parts = [f"<svg viewBox='0 0 {SIDE} {SIDE}' preserveAspectRatio='none' role='img' aria-label='{escape(title)}'>"]
    down = [f"M{_x(chart, v)} 0V{SIDE}" for v, _ in chart.x.ticks if chart.x.grid]
    across = [f"M0 {_y(chart, v)}H{SIDE}" for v, _ in chart.y.ticks if chart.y.grid]
    parts.append(f"<path class='grid' d='{''.join(down + across)}'/>")
    if chart.marked_x is not None:
        parts.append(f"<path class='mark' d='M{_x(chart, chart.marked_x)} 0V{SIDE}'/>")
    for cls, place in (("mark", chart.marked_y), ("mark dotted", chart.dotted_y)):
        if place is not None:
            parts.append(f"<path class='{cls}' d='M0 {_y(chart, place)}H{SIDE}'/>")
    for number, series in enumerate(chart.series):
        hidden = "" if series.shown else " style='display:none'"
        parts.append(f"<g data-series='{number}'{hidden}>{_DRAWN[series.kind](chart, series)}</g>")
    return "".join([*parts, "</svg>"])


def _legend(series: Sequence[Series]) -> str:
    """Return a check box per named series; series of the same name are switched together."""
    numbers: dict[str, list[int]] = {}
    for number, one in enumerate(series):
        numbers.setdefault(one.name, []).append(number)
    named = {s.name: s for s in series if s.named}
    if not named:
        return ""
    items = []
    for name, one in named.items():
        mark = f"{one.kind} dashed" if one.dash else one.kind
        items.append(
            f"<label><input type='checkbox' data-toggles='{' '.join(map(str, numbers[name]))}'"
            f"{' checked' if one.shown else ''}><i class='{mark}' style='--c:{one.colour}'></i>{escape(name)}</label>"
        )
    return f"<div class='legend'>{''.join(items)}</div>"


def _line(chart: Chart, series: Series) -> str:
    parts, before = [], None
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None:
            parts.append(f"{'M' if before is None else 'L'}{_x(chart, x)} {_y(chart, y)}")
        before = y
    return _stroke(series, "".join(parts))


def _steps(chart: Chart, series: Series) -> str:
    parts: list[str] = []
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None:
            parts.append(f"H{_x(chart, x)}V{_y(chart, y)}" if parts else f"M{_x(chart, x)} {_y(chart, y)}")
    return _stroke(series, "".join(parts))


def _dots(chart: Chart, series: Series) -> str:
    """Return a path of round ends without length, which stay round if the SVG is stretched."""
    d = "".join(f"M{_x(chart, x)} {_y(chart, y)}h0" for x, y in zip(series.x, series.y, strict=True) if y is not None)
    outer = _stroke(series, d, " class='round'")
    if series.kind == "dots":
        return outer
    return outer + f"<path class='round' d='{d}' stroke='#fff' stroke-width='{series.size - 4:g}'/>"


def _bars(chart: Chart, series: Series) -> str:
    parts = []
    tips = series.tips or [""] * len(series.x)
    for x, y, base, tip in zip(series.x, series.y, series.base, tips, strict=True):
        if y is None:
            continue
        left, right = (SIDE * chart.x.at(x + side * series.bar_width / 2) for side in (-1, 1))
        ends = sorted((float(_y(chart, y)), float(_y(chart, base))))
        parts.append(
            f"<rect x='{left:.1f}' y='{ends[0]:.1f}' width='{right - left:.1f}' height='{ends[1] - ends[0]:.1f}' "
            f"fill='{series.colour}' fill-opacity='{series.opacity:g}' data-tip='{escape(tip)}'/>"
        )
    return "".join(parts)


def _band(chart: Chart, series: Series) -> str:
    top = [f"{_x(chart, x)} {_y(chart, y)}" for x, y in zip(series.x, series.y, strict=True) if y is not None]
    low = [f"{_x(chart, x)} {_y(chart, y)}" for x, y in zip(series.x, series.base, strict=True)]
    d = "M" + "L".join([*top, *reversed(low)]) + "z"
    return f"<path class='band' d='{d}' fill='{series.colour}' fill-opacity='{series.opacity:g}'/>"


_DRAWN = {"line": _line, "steps": _steps, "dots": _dots, "rings": _dots, "bars": _bars, "band": _band}


def _stroke(series: Series, d: str, cls: str = "") -> str:
    dash = f" stroke-dasharray='{series.dash}'" if series.dash else ""
    faint = f" stroke-opacity='{series.opacity:g}'" if series.opacity < 1 else ""
    return f"<path{cls} d='{d}' stroke='{series.colour}' stroke-width='{series.size:g}'{dash}{faint}/>"


def _x(chart: Chart, value: float) -> str:
    return f"{SIDE * chart.x.at(value):.1f}"


def _y(chart: Chart, value: float) -> str:
    return f"{SIDE - SIDE * chart.y.at(value):.1f}"
