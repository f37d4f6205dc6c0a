"""The published picture of a comparison of agents: quality by measurements as SVG, a panel per split.

Four agents stand out, and their names stand at the ends of their lines. The others are grey.
"""

from __future__ import annotations

import math
from html import escape

from outblas.publish.palette import AGENT_COLOURS, shown_agents
from outblas.publish.words import date_words
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import Figure, figures

WIDTH, HEIGHT, TOP, LEFT, RIGHT, BOTTOM, GAP = 960, 440, 100, 78, 16, 52, 14
#: Room for the names at the right of each panel, and the least distance of two names, in pixels.
NAME_ROOM, NAME_STEP = 66, 15

#: Name of the vertical axis.
QUALITY = "best time / time of the choice"
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; } .soft { fill: #57606a; } .end { text-anchor: end; }
.mid { text-anchor: middle; } .name { font-weight: 600; }
.card { fill: #ffffff; stroke: #d0d7de; } .grid { stroke: #e3e7eb; } .lead { stroke: #8c959f; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; } .band { stroke: none; opacity: 0.15; }
.noise { stroke: #57606a; stroke-dasharray: 3 3; }
.quiet { fill: none; stroke: #c4cad0; stroke-width: 1.3; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .soft { fill: #9da7b3; } .card { fill: #0d1117; stroke: #30363d; } .grid { stroke: #262c34; }
  .band { opacity: 0.25; } .quiet { stroke: #484f58; }
}
"""

Box = tuple[float, float, float, float]
Made = dict[tuple[str, int], Figure]


def compare_svg(comparison: Comparison) -> str:
    """Return the curves of every split as SVG text. The same file gives the same bytes."""
    made = {split: figures(comparison, split) for split in comparison.splits}
    low = min(f.low for of_split in made.values() for f in of_split.values())
    low = max(0.0, math.floor(20 * low) / 20)
    width = (WIDTH - LEFT - RIGHT - GAP * (len(made) - 1)) / len(made)
    title = f"Agents on held-out problems of {comparison.meta['suite']}"
    where = f"recording of {comparison.measured['gpu']}, {date_words(comparison.measured['date'])}"
    middle = TOP + (HEIGHT - BOTTOM - TOP) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(_describe(comparison, made))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        f'<text class="title" x="20" y="32">{escape(title)}</text>',
        f'<text class="soft" x="20" y="54">{escape(f"{where}; {_key(comparison)}")}</text>',
        f'<text class="soft mid" transform="translate(24 {middle:.1f}) rotate(-90)">{QUALITY}</text>',
    ]
    for index, (split, of_split) in enumerate(made.items()):
        box = (LEFT + index * (width + GAP), TOP, width - NAME_ROOM, HEIGHT - BOTTOM - TOP)
        parts += _panel(comparison, split, of_split, box, low, first=index == 0)
    centre = f'class="soft mid" x="{LEFT + (WIDTH - LEFT - RIGHT) / 2:.1f}" y="{HEIGHT - 12}"'
    return "\n".join([*parts, f"<text {centre}>measurements</text>", "</svg>"]) + "\n"


def _panel(comparison: Comparison, split: str, made: Made, box: Box, low: float, first: bool) -> list[str]:
    x0, top, width, height = box
    budgets = comparison.budgets

    def x(place: int) -> float:
        return x0 + width * place / max(1, len(budgets) - 1)

    def y(quality: float) -> float:
        return top + height * (1 - quality) / (1 - low)

    parts = [f'<text x="{x0:.1f}" y="{top - 14:.1f}">split {escape(split)}</text>']
    step = 0.05 if low >= 0.7 else 0.1
    for tick in (round(1 - i * step, 2) for i in range(int((1 - low) / step + 1.001))):
        parts.append(f'<line class="grid" x1="{x0:.1f}" x2="{x0 + width:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        if first:
            parts.append(f'<text class="soft end" x="{x0 - 8:.1f}" y="{y(tick) + 4:.1f}">{tick:g}</text>')
    for place, budget in enumerate(budgets):
        parts.append(f'<text class="soft mid" x="{x(place):.1f}" y="{top + height + 18:.1f}">{budget}</text>')
    floor = comparison.meta["splits"][split].get("noise_floor")
    if floor is not None:
        parts.append(
            f'<line class="noise" x1="{x0:.1f}" x2="{x0 + width:.1f}" y1="{y(floor):.1f}" y2="{y(floor):.1f}"/>'
        )
    shown = shown_agents(comparison.agents)
    bands, quiet, lines = list[str](), list[str](), list[str]()
    for agent in comparison.agents:
        mine = [made[agent, b] for b in budgets]
        points = _points([(x(i), y(f.quality)) for i, f in enumerate(mine)])
        if agent not in shown:
            quiet.append(f'<polyline class="quiet" points="{points}"/>')
            continue
        colour = AGENT_COLOURS[shown.index(agent)]
        edge = [(x(i), y(f.high)) for i, f in enumerate(mine)]
        edge += [(x(i), y(f.low)) for i, f in reversed(list(enumerate(mine)))]
        bands.append(f'<polygon class="band" fill="{colour}" points="{_points(edge)}"/>')
        lines.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
    ends = {agent: y(made[agent, budgets[-1]].quality) for agent in shown}
    return parts + quiet + bands + lines + _names(ends, shown, x0 + width, top)


def _names(ends: dict[str, float], shown: tuple[str, ...], right: float, top: float) -> list[str]:
    """Return the names at the ends of the lines, moved apart, with a leader from each end."""
    parts, lowest = list[str](), top - NAME_STEP
    for agent in sorted(ends, key=lambda a: ends[a]):
        place = max(ends[agent], lowest + NAME_STEP)
        lowest = place
        parts.append(
            f'<line class="lead" x1="{right:.1f}" x2="{right + 8:.1f}" y1="{ends[agent]:.1f}" y2="{place:.1f}"/>'
        )
        style = f'style="fill:{AGENT_COLOURS[shown.index(agent)]}"'
        parts.append(f'<text class="name" {style} x="{right + 11:.1f}" y="{place + 4:.1f}">{escape(agent)}</text>')
    return parts


def _key(comparison: Comparison) -> str:
    """Return the meaning of bands and grey lines in words."""
    others = len(comparison.agents) - len(shown_agents(comparison.agents))
    grey = f"; grey: {others} other agent{'' if others == 1 else 's'}" if others else ""
    floors = all("noise_floor" in about for about in comparison.meta["splits"].values())
    return f"bands: 95% intervals{grey}{'; dashed: the noise floor of the recording' if floors else ''}"


def _describe(comparison: Comparison, made: dict[str, Made]) -> str:
    said = [
        f"{split} {agent}: " + ", ".join(f"{of_split[agent, b].quality:.3f} at {b}" for b in comparison.budgets)
        for split, of_split in made.items()
        for agent in comparison.agents
    ]
    return "Geometric means. " + "; ".join(said) + "."


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
