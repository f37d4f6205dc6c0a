"""Charts of an evolution: progress and lineage; and the changes of a kernel against its parents."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence

from outblas_lab.publish.drawing import drawing
from outblas_lab.publish.html.charts import WIDE, Chart
from outblas_lab.publish.html.evolve_data import LineageNode
from outblas_lab.publish.palette import GREY, INK

BLUE, ORANGE = "#0072b2", "#d55e00"
#: Lines of a difference that a page shows at most.
_LINES = 400
#: Kernels up to which each one has its label beside it; the pointer shows the labels of a larger lineage.
_LABELLED = 24


@drawing()
def progress_chart(points: Sequence[tuple[int, float, str]], floor_ratio: float | None) -> Chart:
    """Return the speed-ups of proven kernels by number of answers, with the best so far.

    Args:
        points: (answers so far, speed-up, kind of the answer) each.
        floor_ratio: speed-up of the floor, drawn dotted; None if it is not known.
    """
    from matplotlib.ticker import MaxNLocator

    chart = Chart("answers", "speed-up over the fastest baseline (×)", WIDE)
    best = [max(ratio for _, ratio, _ in points[: i + 1]) for i in range(len(points))]
    line = chart.axes.step([x for x, _, _ in points], best, where="post", color=INK, linewidth=2)
    chart.add("best so far", line, INK)
    for kind, colour in (("code", BLUE), ("config", ORANGE)):
        mine = [(x, y) for x, y, of in points if of == kind]
        if mine:
            dots = chart.axes.plot(*zip(*mine, strict=True), "o", color=colour, markersize=8)
            chart.add(kind, dots, colour, "dots", tips=[f"answer {x} ({kind}): {y:.3f}×" for x, y in mine])
    chart.axes.axhline(1.0, color=GREY, linewidth=1.5)
    if floor_ratio:
        chart.axes.axhline(floor_ratio, color=GREY, linewidth=1.5, linestyle=":")
    chart.axes.set_xlim(0, max([x for x, _, _ in points], default=1) + 0.5)
    chart.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return chart


@drawing()
def lineage_chart(nodes: Sequence[LineageNode]) -> Chart:
    """Return generations from left to right, with an edge from every parent; proven kernels are filled."""
    from matplotlib.ticker import MaxNLocator

    chart = Chart("generation", "", WIDE)
    rows: dict[int, list[LineageNode]] = defaultdict(list)
    for node in nodes:
        rows[node.generation].append(node)
    place = {n.name: (float(g), i - (len(row) - 1) / 2) for g, row in rows.items() for i, n in enumerate(row)}
    ends = [(place[parent], place[node.name]) for node in nodes for parent in node.parents]
    gap = float("nan")
    edges = [[(start[i], end[i], gap) for start, end in ends] for i in (0, 1)]
    chart.add("edges", chart.axes.plot(*(sum(axis, ()) for axis in edges), color=GREY, linewidth=1.5), GREY, "")
    for name, colour, fill, proven in (("proven", BLUE, BLUE, True), ("not proven", ORANGE, "white", False)):
        mine = [n for n in nodes if (n.outcome.kind == "proven") is proven]
        if mine:
            xs, ys = zip(*(place[n.name] for n in mine), strict=True)
            dots = chart.axes.plot(xs, ys, "o", color=colour, markersize=13, markerfacecolor=fill, markeredgewidth=2)
            tips = [f"question {n.outcome.question}: {n.name}, {node_label(n)}" for n in mine]
            chart.add(name, dots, colour, "dots", tips=tips)
    for node in nodes if len(nodes) <= _LABELLED else ():
        label = node_label(node).replace(", ", "\n")
        chart.axes.annotate(label, place[node.name], (0, 11), textcoords="offset points", ha="center", size=10)
    widest = max((len(row) for row in rows.values()), default=1)
    chart.axes.set(xlim=(-0.6, max(rows, default=0) + 0.6), ylim=(-widest / 2 - 0.4, widest / 2 + 0.6), yticks=[])
    chart.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    chart.axes.grid(visible=False)
    return chart


def node_label(node: LineageNode) -> str:
    """Return a candidate's time and speed-up, e.g. ``"12.50 µs, 1.043×"``; its outcome if it was not proven.

    An outcome is a kind such as ``"wrong"``. Without a ratio the text is the time alone.
    """
    o = node.outcome
    if o.kind != "proven" or o.us is None:
        return o.kind
    return f"{o.us:.2f} µs" + ("" if o.ratio is None else f", {o.ratio:.3f}×")


def difference(before: str, after: str, names: tuple[str, str]) -> list[str]:
    """Return the lines of a unified difference, at most 400 and then a line on the rest; none of equal texts."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2))
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"{len(lines) - _LINES} more lines"]
