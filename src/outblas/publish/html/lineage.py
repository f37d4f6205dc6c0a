"""A lineage as a Plotly figure, and what a kernel changed of its parents."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from outblas.publish.html.evolve_data import LineageNode
from outblas.publish.palette import GREY, GRID, INK

BLUE, ORANGE = "#0072b2", "#d55e00"
#: Lines of a difference that a page shows at most.
_LINES = 400


def lineage_figure(nodes: Sequence[LineageNode]) -> dict[str, Any]:
    """Generations from left to right; an edge from every parent. Proven kernels are filled, others hollow."""
    rows: dict[int, list[LineageNode]] = defaultdict(list)
    for node in nodes:
        rows[node.generation].append(node)
    place = {n.name: (g, i - (len(row) - 1) / 2) for g, row in rows.items() for i, n in enumerate(row)}
    edges: dict[str, list[float | None]] = {"x": [], "y": []}
    for node in nodes:
        for parent in node.parents:
            for axis, start, end in zip(("x", "y"), place[parent], place[node.name], strict=True):
                edges[axis] += [start, end, None]
    proven = [n.outcome.kind == "proven" for n in nodes]
    marks = {
        "size": 16,
        "symbol": ["circle" if p else "circle-open" for p in proven],
        "color": [BLUE if p else ORANGE for p in proven],
        "line": {"width": 2},
    }
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            **edges,
            "hoverinfo": "skip",
            "showlegend": False,
            "line": {"color": GREY},
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [place[n.name][0] for n in nodes],
            "y": [place[n.name][1] for n in nodes],
            "text": [node_label(n) for n in nodes],
            "textposition": "top center",
            "hovertext": [f"question {n.outcome.question}: {escape(n.name)}, {node_label(n)}" for n in nodes],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "showlegend": False,
            "marker": marks,
            "cliponaxis": False,
        },
    ]
    hidden = {"showgrid": False, "zeroline": False, "showticklabels": False, "automargin": True}
    widest = max((len(row) for row in rows.values()), default=1)
    layout = _layout() | {
        "xaxis": {**hidden, "title": {"text": "generation"}, "range": [-0.6, max(rows, default=0) + 0.6]},
        "yaxis": {**hidden, "range": [-widest / 2 - 0.4, widest / 2 + 0.6]},
    }
    return {"data": data, "layout": layout}


def node_label(node: LineageNode) -> str:
    """Its time and speed-up, or what became of it."""
    o = node.outcome
    if o.kind != "proven" or o.us is None:
        return o.kind
    return f"{o.us:.2f} µs" + ("" if o.ratio is None else f", {o.ratio:.3f}×")


def progress_figure(points: Sequence[tuple[int, float, str]], floor_ratio: float | None) -> dict[str, Any]:
    """Speed-ups of proven kernels by number of answers, the best so far, and the floor's where it is known.

    Args:
        points: (answers so far, speed-up, kind of the answer).
    """
    best, steps = 0.0, []
    stairs = {"shape": "hv", "color": INK, "width": 2}
    for count, ratio, _ in points:
        best = max(best, ratio)
        steps.append((count, best))
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "best so far", "line": stairs,
            "x": [x for x, _ in steps], "y": [y for _, y in steps],
        }
    ]  # fmt: skip
    for kind, colour, symbol in (("code", BLUE, "circle"), ("config", ORANGE, "diamond")):
        mine = [(x, y) for x, y, of in points if of == kind]
        if mine:
            data.append(
                {
                    "type": "scatter", "mode": "markers", "name": kind, "marker": {"color": colour, "symbol": symbol},
                    "x": [x for x, _ in mine], "y": [y for _, y in mine],
                }
            )  # fmt: skip
    shapes = []
    for y, dash in ((1.0, "solid"), (floor_ratio, "dot")):
        if y is not None:
            line = {"color": GREY, "width": 1, "dash": dash}
            shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line})
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True}
    layout = _layout() | {
        "xaxis": {**axis, "title": {"text": "answers"}, "rangemode": "tozero"},
        "yaxis": {**axis, "title": {"text": "speed-up over the fastest baseline"}},
        "shapes": shapes,
    }
    return {"data": data, "layout": layout}


def difference_html(before: str, after: str, names: tuple[str, str]) -> str:
    """A unified difference as HTML, its lines marked; says so where there is none."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2))
    if not lines:
        return "<p class='note'>The texts are the same.</p>"
    cut = "" if len(lines) <= _LINES else f"\n{len(lines) - _LINES} more lines"
    return code_html("\n".join(lines[:_LINES]) + cut, marked=True)


def code_html(text: str, marked: bool = False) -> str:
    """A block of code; ``marked``: lines that a difference adds or takes away stand out."""
    lines = []
    for line in text.splitlines():
        mark = {"+": "ins", "-": "del"}.get(line[:1]) if marked and not line.startswith(("+++", "---")) else None
        lines.append(f"<{mark}>{escape(line)}</{mark}>" if mark else escape(line))
    body = "\n".join(lines)
    return f"<pre class='code' tabindex='0' role='region' aria-label='code'>{body}</pre>"


def _layout() -> dict[str, Any]:
    return {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 24, "t": 36, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
