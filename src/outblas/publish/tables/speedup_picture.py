"""The published picture of the speed-ups: sorted, by kind of problem, as SVG.

Its card and its text change colour with the preference of the reader for light or dark, so it is
legible on any page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from outblas.core.stats import geomean
from outblas.publish.palette import ratio_ticks
from outblas.publish.words import PDL_NAMES
from outblas.records.results import Result, Row

WIDTH, HEIGHT = 960, 400
LEFT, RIGHT, TOP, BOTTOM, GAP = 62, 20, 112, 52, 22
KINDS = (("launch", "launch-bound"), ("memory", "memory-bound"), ("compute", "compute-bound"))

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; } .soft { fill: #57606a; } .end { text-anchor: end; }
.mid { text-anchor: middle; }
.card { fill: #ffffff; stroke: #d0d7de; } .grid { stroke: #e3e7eb; } .one { stroke: #6e7781; stroke-width: 1.5; }
.on, .off { fill: none; stroke-width: 2.5; stroke-linejoin: round; } .off { stroke: #c2570c; stroke-dasharray: 2 4;
  stroke-linecap: round; } .on { stroke: #0b5fcc; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .soft { fill: #9da7b3; } .card { fill: #0d1117; stroke: #30363d; } .grid { stroke: #262c34; }
  .one { stroke: #8b949e; } .off { stroke: #f0883e; } .on { stroke: #58a6ff; }
}
"""


def speedup_svg(result: Result, rows: Sequence[Row]) -> str:
    """Return the sorted published speed-ups of `rows` as SVG text, a panel per kind of problem.

    The same rows give the same bytes.

    Args:
        result: the file of the rows, for its suite and provenance.
        rows: rows of one layout, dtype, accumulator and mode.
    """
    panels = [(label, [r for r in rows if r["regime"].startswith(kind)]) for kind, label in KINDS]
    panels.append(("other", [r for r in rows if not r["regime"].startswith(tuple(kind for kind, _ in KINDS))]))
    panels = [(label, found) for label, found in panels if found]
    speedups = [row["published"] for row in rows]
    low = min(0.95, *speedups) / 1.01
    high = max(1.1, *speedups) * 1.02
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    head = rows[0]
    kind = f"{result.suite} {head['layout']}, {head['dtype']}, {head['acc']} accumulate"
    title = f"Speed-up over the best baseline: {kind}"
    where = f"{result.provenance['gpu']}, {head['mode']}, {result.provenance['date']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(_describe(panels, where))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        f'<text class="title" x="20" y="32">{escape(title)}</text>',
        f'<text class="soft" x="20" y="54">{escape(where)}</text>',
        *_legend(sorted({r["pdl"] for r in rows})),
    ]
    for index, (label, found) in enumerate(panels):
        parts += _panel(LEFT + index * (width + GAP), width, label, found, low, high, first=index == 0)
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    below = f'class="soft mid" x="{middle:.1f}" y="{HEIGHT - 12}"'
    parts.append(f"<text {below}>share of problems, sorted by speed-up</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(x0: float, width: float, label: str, rows: list[Row], low: float, high: float, first: bool) -> list[str]:
    bottom = HEIGHT - BOTTOM

    def y(ratio: float) -> float:
        return bottom - (bottom - TOP) * math.log(ratio / low) / math.log(high / low)

    parts = []
    for tick in ratio_ticks(low, high):
        cls = "one" if tick == 1.0 else "grid"
        parts.append(f'<line class="{cls}" x1="{x0:.1f}" x2="{x0 + width:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        if first:
            parts.append(f'<text class="soft end" x="{x0 - 8:.1f}" y="{y(tick) + 4:.1f}">{tick:g}×</text>')
    for share, anchor in ((0, ""), (50, " mid"), (100, " end")):
        parts.append(f'<text class="soft{anchor}" x="{x0 + width * share / 100:.1f}" y="{bottom + 18}">{share}%</text>')
    means = []
    for pdl in sorted({r["pdl"] for r in rows}):
        values = sorted(r["published"] for r in rows if r["pdl"] is pdl)
        step = width / len(values)
        points = " ".join(f"{x0 + (i + 0.5) * step:.1f},{y(v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline class="{_css(pdl)}" points="{points}"/>')
        means.append(f"{geomean(values):.3f}×")
    count = len({(r["m"], r["n"], r["k"]) for r in rows})
    parts.append(f'<text x="{x0:.1f}" y="{TOP - 26}">{escape(label)} ({count})</text>')
    parts.append(f'<text class="soft" x="{x0:.1f}" y="{TOP - 9}">geometric mean {" / ".join(means)}</text>')
    return parts


def _legend(pdls: list[bool]) -> list[str]:
    parts, x = [], WIDTH - RIGHT - 130 * len(pdls)
    for pdl in pdls:
        parts.append(f'<line class="{_css(pdl)}" x1="{x}" x2="{x + 28}" y1="50" y2="50"/>')
        parts.append(f'<text x="{x + 36}" y="54">{PDL_NAMES[pdl]}</text>')
        x += 130
    return parts


def _describe(panels: list[tuple[str, list[Row]]], where: str) -> str:
    said = []
    for label, rows in panels:
        for pdl in sorted({r["pdl"] for r in rows}):
            said.append(f"{label} {PDL_NAMES[pdl]}: {geomean(r['published'] for r in rows if r['pdl'] is pdl):.3f}")
    return f"Measured on {where}. Geometric means: " + "; ".join(said) + "."


def _css(pdl: bool) -> str:
    return "on" if pdl else "off"
