"""The README's picture of a comparison of agents: quality by measurements with intervals, as SVG, a panel per split."""

from __future__ import annotations

import math
from html import escape

from outblas.publish.palette import AGENT_COLOURS
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import Figure, figures

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, GAP = 960, 420, 62, 20, 52, 22
#: Width of an agent's entry in the legend, and height of a line of it.
ENTRY, LINE = 130, 20
#: Dashes of the first, second and third time round the colours.
_DASHES = ("none", "7 4", "2 4")

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; } .soft { fill: #57606a; } .end { text-anchor: end; }
.mid { text-anchor: middle; }
.card { fill: #ffffff; stroke: #d0d7de; } .grid { stroke: #e3e7eb; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; } .band { stroke: none; opacity: 0.15; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .soft { fill: #9da7b3; } .card { fill: #0d1117; stroke: #30363d; } .grid { stroke: #262c34; }
  .band { opacity: 0.25; }
}
"""


def compare_svg(comparison: Comparison) -> str:
    """Curves of every split. The same file gives the same bytes."""
    made = {split: figures(comparison, split) for split in comparison.splits}
    low = min(f.low for of_split in made.values() for f in of_split.values())
    low = max(0.0, math.floor(20 * low) / 20)
    top = 96 + LINE * math.ceil(len(comparison.agents) / _per_line())
    width = (WIDTH - LEFT - RIGHT - GAP * (len(made) - 1)) / len(made)
    title = f"Agents on held-out problems of {comparison.meta['suite']}: best time / found time"
    where = f"recording of {comparison.measured['gpu']}, {str(comparison.measured['date'])[:10]}; bands: 95% intervals"
    height = HEIGHT + top - 116
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(_describe(comparison, made))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="title" x="20" y="32">{escape(title)}</text>',
        f'<text class="soft" x="20" y="54">{escape(where)}</text>',
        *_legend(comparison.agents),
    ]
    for index, (split, of_split) in enumerate(made.items()):
        box = (LEFT + index * (width + GAP), top, width, height - BOTTOM - top)
        parts += _panel(comparison, split, of_split, box, low, first=index == 0)
    middle = f'class="soft mid" x="{LEFT + (WIDTH - LEFT - RIGHT) / 2:.1f}" y="{height - 12}"'
    return "\n".join([*parts, f"<text {middle}>measurements</text>", "</svg>"]) + "\n"


def _panel(
    comparison: Comparison,
    split: str,
    made: dict[tuple[str, int], Figure],
    box: tuple[float, float, float, float],
    low: float,
    first: bool,
) -> list[str]:
    x0, top, width, height = box
    budgets = comparison.budgets

    def x(place: int) -> float:
        return x0 + width * (place + 0.5) / len(budgets)

    def y(quality: float) -> float:
        return top + height * (1 - quality) / (1 - low)

    parts = [f'<text x="{x0:.1f}" y="{top - 12:.1f}">split {escape(split)}</text>']
    for tick in _ticks(low):
        parts.append(f'<line class="grid" x1="{x0:.1f}" x2="{x0 + width:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        if first:
            parts.append(f'<text class="soft end" x="{x0 - 8:.1f}" y="{y(tick) + 4:.1f}">{tick:g}</text>')
    for place, budget in enumerate(budgets):
        parts.append(f'<text class="soft mid" x="{x(place):.1f}" y="{top + height + 18:.1f}">{budget}</text>')
    lines = []
    for index, agent in enumerate(comparison.agents):
        mine = [made[agent, b] for b in budgets]
        edge = [(x(i), y(f.high)) for i, f in enumerate(mine)]
        edge += [(x(i), y(f.low)) for i, f in reversed(list(enumerate(mine)))]
        parts.append(f'<polygon class="band" fill="{_colour(index)}" points="{_points(edge)}"/>')
        points = _points([(x(i), y(f.quality)) for i, f in enumerate(mine)])
        lines.append(f'<polyline class="line" {_stroke(index)} points="{points}"/>')
    return parts + lines


def _legend(agents: tuple[str, ...]) -> list[str]:
    parts = []
    for index, agent in enumerate(agents):
        row, place = divmod(index, _per_line())
        x, y = 20 + ENTRY * place, 72 + LINE * row
        parts.append(f'<line class="line" {_stroke(index)} x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{x + 36}" y="{y + 4}">{escape(agent)}</text>')
    return parts


def _describe(comparison: Comparison, made: dict[str, dict[tuple[str, int], Figure]]) -> str:
    said = [
        f"{split} {agent}: " + ", ".join(f"{of_split[agent, b].quality:.3f} at {b}" for b in comparison.budgets)
        for split, of_split in made.items()
        for agent in comparison.agents
    ]
    return "Geometric means. " + "; ".join(said) + "."


def _ticks(low: float) -> list[float]:
    step = 0.05 if low >= 0.7 else 0.1
    return [round(1 - i * step, 2) for i in range(int((1 - low) / step + 1.001))]


def _per_line() -> int:
    return (WIDTH - 40) // ENTRY


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _colour(index: int) -> str:
    return AGENT_COLOURS[index % len(AGENT_COLOURS)]


def _stroke(index: int) -> str:
    return f'stroke="{_colour(index)}" stroke-dasharray="{_DASHES[index // len(AGENT_COLOURS) % len(_DASHES)]}"'
