"""Charts of an evolution: progress and lineage; and the changes of a kernel against its parents, as HTML."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from outblas_lab.publish.html.charts import Axis, Chart, Series
from outblas_lab.publish.html.evolve_data import LineageNode
from outblas_lab.publish.html.figures import round_ticks
from outblas_lab.publish.palette import GREY, INK

BLUE, ORANGE = "#0072b2", "#d55e00"
#: Lines of a difference that a page shows at most.
_LINES = 400
#: Kernels up to which each one has its label beside it; the pointer shows the labels of a larger lineage.
_LABELLED = 24


def lineage_chart(nodes: Sequence[LineageNode]) -> Chart:
    """Return generations from left to right, with an edge from every parent; proven kernels are filled."""
    rows: dict[int, list[LineageNode]] = defaultdict(list)
    for node in nodes:
        rows[node.generation].append(node)
    place = {n.name: (float(g), i - (len(row) - 1) / 2) for g, row in rows.items() for i, n in enumerate(row)}
    xs: list[float] = []
    ys: list[float | None] = []
    for node in nodes:
        for parent in node.parents:
            start, end = place[parent], place[node.name]
            xs += [start[0], end[0], end[0]]
            ys += [start[1], end[1], None]
    series = [Series("edges", "line", GREY, xs, ys, size=1.5, named=False)]
    for name, kind, colour, proven in (
        ("proven", "dots", BLUE, True),
        ("not proven", "rings", ORANGE, False),
    ):
        mine = [n for n in nodes if (n.outcome.kind == "proven") is proven]
        if mine:
            series.append(
                Series(
                    name,
                    "dots" if kind == "dots" else "rings",
                    colour,
                    x=[place[n.name][0] for n in mine],
                    y=[place[n.name][1] for n in mine],
                    tips=[f"question {n.outcome.question}: {n.name}, {node_label(n)}" for n in mine],
                    size=15,
                )
            )
    widest = max((len(row) for row in rows.values()), default=1)
    last = max(rows, default=0)
    labels = [(*place[n.name], node_label(n)) for n in nodes] if len(nodes) <= _LABELLED else []
    generations = (
        [(t, f"{t:g}") for t in round_ticks(0, last)] if last >= 8 else [(float(g), str(g)) for g in sorted(rows)]
    )
    return Chart(
        Axis("generation", -0.6, last + 0.6, generations, grid=False),
        Axis("", -widest / 2 - 0.4, widest / 2 + 0.6),
        series,
        labels=labels,
    )


def node_label(node: LineageNode) -> str:
    """Return the time and the speed-up of a candidate, e.g. ``"12.50 µs, 1.043×"``, or its outcome if it was not
    proven.

    An outcome is a kind such as ``"wrong"``. Without a ratio the text is the time alone.
    """
    o = node.outcome
    if o.kind != "proven" or o.us is None:
        return o.kind
    return f"{o.us:.2f} µs" + ("" if o.ratio is None else f", {o.ratio:.3f}×")


def progress_chart(points: Sequence[tuple[int, float, str]], floor_ratio: float | None) -> Chart:
    """Return the speed-ups of proven kernels by number of answers, with the best so far.

    Args:
        points: (answers so far, speed-up, kind of the answer) each.
        floor_ratio: speed-up of the floor, drawn dotted; None if it is not known.
    """
    best, stairs = 0.0, list[tuple[int, float]]()
    for count, ratio, _ in points:
        best = max(best, ratio)
        stairs.append((count, best))
    series = [Series("best so far", "steps", INK, [x for x, _ in stairs], [y for _, y in stairs], size=2)]
    for kind, colour in (("code", BLUE), ("config", ORANGE)):
        mine = [(x, y) for x, y, of in points if of == kind]
        if mine:
            tips = [f"answer {x} ({kind}): {y:.3f}×" for x, y in mine]
            series.append(Series(kind, "dots", colour, [x for x, _ in mine], [y for _, y in mine], tips=tips, size=9))
    values = [1.0, *(ratio for _, ratio, _ in points), *([floor_ratio] if floor_ratio else [])]
    room = max(0.05, max(values) - min(values)) * 0.08
    low, high = min(values) - room, max(values) + room
    last = max([x for x, _, _ in points], default=1) + 0.5
    return Chart(
        Axis("answers", 0, last, [(t, f"{t:g}") for t in round_ticks(0, last) if t == int(t)]),
        Axis("speed-up over the fastest baseline (×)", low, high, [(t, f"{t:g}") for t in round_ticks(low, high)]),
        series,
        marked_y=1.0,
        dotted_y=floor_ratio,
    )


def difference_html(before: str, after: str, names: tuple[str, str]) -> str:
    """Return a unified difference as HTML with marked lines, or a paragraph if the texts are equal.

    Args:
        before: the old text.
        after: the new text.
        names: their names in the difference's head.
    """
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2))
    if not lines:
        return "<p class='note'>The texts are the same.</p>"
    cut = "" if len(lines) <= _LINES else f"\n{len(lines) - _LINES} more lines"
    return code_html("\n".join(lines[:_LINES]) + cut, marked=True)


def code_html(text: str, marked: bool = False) -> str:
    """Return a block of code as HTML, ``<pre class='code' ...>``; the text is escaped.

    Args:
        text: the code or the difference.
        marked: mark the lines that a difference adds (``<ins>``) or removes (``<del>``).
    """
    lines = []
    for line in text.splitlines():
        mark = {"+": "ins", "-": "del"}.get(line[:1]) if marked and not line.startswith(("+++", "---")) else None
        lines.append(f"<{mark}>{escape(line)}</{mark}>" if mark else escape(line))
    body = "\n".join(lines)
    return f"<pre class='code' tabindex='0' role='region' aria-label='code'>{body}</pre>"
