"""Charts of a report: figures of Matplotlib with series that a reader can switch, and texts under the pointer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from outblas_lab.publish.drawing import svg_content
from outblas_lab.publish.palette import GREY

#: Widths of a chart beside another one and of one alone, in points.
NARROW, WIDE = 620, 900


@dataclass(frozen=True)
class Series:
    """A set of values in a chart.

    Attributes:
        name: text of the legend; series of the same name are switched together.
        artists: their ``matplotlib.artist.Artist``; one each for bars, one in all for lines, dots and bands.
        mark: shape in the legend: ``line``, ``dashed``, ``dots`` or ``bars``; an empty text: not part of it.
        tips: a text per value, shown under the pointer.
        rows: numbers of the group's rows, whose texts the page's script writes; in place of `tips`.
    """

    name: str
    artists: Sequence[Any]
    colour: str
    mark: str
    tips: Sequence[str] = ()
    rows: Sequence[int] = ()
    shown: bool = True


class Chart:
    """A chart with one pair of axes, made and filled within :func:`outblas_lab.publish.drawing.drawing`."""

    def __init__(self, x: str, y: str, width: int = NARROW, height: int = 340) -> None:
        """Make an empty chart.

        Args:
            x: quantity and unit of the horizontal axis.
            y: those of the vertical axis.
        """
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self._figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        self.axes: Any = self._figure.subplots()
        self.axes.set(xlabel=x, ylabel=y)
        self.series: list[Series] = []

    def add(self, name: str, artists: Iterable[Any], colour: str, mark: str = "line", **more: Any) -> None:
        """Add what was drawn as a series; the arguments are those of :class:`Series`."""
        series = Series(name, list(artists), colour, mark, **more)
        for place, artist in enumerate(series.artists):
            artist.set_gid(f"series-{len(self.series)}-{place}")
        self.series.append(series)

    def ratio_axis(self, axis: str, low: float, high: float, ticks: Sequence[float]) -> None:
        """Make an axis of ratios logarithmic, so that 2x faster and 2x slower are equally far from 1."""
        self.axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low, high)})
        side = getattr(self.axes, f"{axis}axis")
        side.set_ticks([], minor=True)
        side.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        (self.axes.axvline if axis == "x" else self.axes.axhline)(1.0, color=GREY, linewidth=1.5, zorder=1.5)

    def svg(self, name: str) -> str:
        """Return the content of the SVG, with the attributes ``data-series`` and ``data-tip`` of the page's script.

        Args:
            name: unique on the page.
        """

        def attributes(found: re.Match[str]) -> str:
            series = self.series[int(found[1])]
            tip = f' data-tip="{escape(series.tips[int(found[2])])}"' if series.mark == "bars" else ""
            hidden = "" if series.shown else ' style="display:none"'
            return f'data-series="{found[1]}"{tip}{hidden}'

        return re.sub(r'id="series-(\d+)-(\d+)"', attributes, svg_content(self._figure, name))

    def legend(self) -> list[tuple[Series, str]]:
        """Return each series of the legend with the numbers of all series of its name, e.g. ``"0 3"``."""
        return [
            (one, " ".join(str(i) for i, other in enumerate(self.series) if other.name == one.name))
            for one in self.series
            if one.mark
        ]

    def payload(self) -> dict[str, Any]:
        """Return what the page's script reads: texts under the pointer, by series.

        It is ``{"series": [{"name": ..., "tips": [...], "rows": [...]}, ...]}``.
        """
        return {"series": [{"name": s.name, "tips": list(s.tips), "rows": list(s.rows)} for s in self.series]}
