"""The published picture of the small table of results: a bar for each use and GPU, grouped by the rival."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from outblas_lab.publish.drawing import SOFT, drawing
from outblas_lab.publish.palette import AGENT_COLOURS, INK
from pages.card import PICTURE_SIZE, QUIET, picture
from pages.headline import HeadlineRow, short_name

WIDTH, TOP, LINE = 640, 90, 24
#: Ends of the bars in points, and the width of a column of figures on their right.
BARS, COLUMN = (375, 490), 62
#: Characters of a use that fit beside the bars.
_NAME = 43


@drawing(PICTURE_SIZE)
def headline_svg(rows: Sequence[HeadlineRow]) -> str:
    """Return the geometric means of the table's rows as SVG text, in the table's order below each rival."""
    from matplotlib.figure import Figure

    gpus = list(dict.fromkeys(short_name(row.gpu) for row in rows))
    columns = {gpu: WIDTH - 20 - COLUMN * (len(gpus) - 1 - place) for place, gpu in enumerate(gpus)}
    by_rival: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        by_rival.setdefault(row.rival, {}).setdefault(row.use, {})[short_name(row.gpu)] = row.geomean
    height = TOP + LINE * (1 + sum(1 + len(uses) for uses in by_rival.values())) + 40
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    page = figure.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, WIDTH), ylim=(height, 0))
    page.set_axis_off()
    low, high = min(0.98, *(row.geomean for row in rows)), max(1.02, *(row.geomean for row in rows))

    def place(ratio: float) -> float:
        return BARS[0] + (BARS[1] - BARS[0]) * math.log(ratio / low) / math.log(high / low)

    for gpu, x in columns.items():
        page.text(x, TOP, gpu, ha="right", va="center", weight="bold", color=AGENT_COLOURS[gpus.index(gpu)])
    y = TOP
    for rival, uses in by_rival.items():
        y += LINE
        page.text(20, y, f"over {rival}", va="center", weight="bold", color=INK)
        for use, means in uses.items():
            y += LINE
            name = textwrap.shorten(use.replace("`", "").replace("*", ""), _NAME, placeholder=" …")
            page.text(20, y, name, va="center", color=INK)
            for gpu, mean in means.items():
                colour, thick = AGENT_COLOURS[gpus.index(gpu)], 16 / len(gpus)
                top = y - 8 + gpus.index(gpu) * thick
                page.barh(top, place(mean) - place(1), thick, place(1), align="edge", color=colour)
                page.text(columns[gpu], y, f"{mean:.3f}×", ha="right", va="center", color=colour)
    for tick in [tick for tick in (0.5, 1, 1.2, 1.5, 2, 3, 5, 10) if low <= tick <= high]:
        page.plot([place(tick)] * 2, [TOP + LINE / 2, y + LINE / 2], color=QUIET, linewidth=1, zorder=0.5)
        page.text(place(tick), y + LINE, f"{tick:g}×", ha="center", va="center", color=SOFT)
    below = ["Geometric mean of the speed-ups, on a log scale. Right of 1×: OutBLAS is faster."]
    drawn = [[row.gpu, row.use, row.rival, row.geomean] for row in rows]
    words = "; ".join(f"{row.use} over {row.rival} on {row.gpu}: {row.geomean:.3f}" for row in rows)
    return picture(figure, "What OutBLAS gains, by use", below, f"{below[0]} {words}.", drawn)
