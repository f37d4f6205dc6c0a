"""The published picture of a comparison of agents: quality by measurements as SVG, a panel per split.

Some agents stand out, the others are grey. All names stand beside the last panel, in the order of its lines' ends.
"""

from __future__ import annotations

import math
from typing import Any

from outblas_lab.compare.compare_result import Comparison, Figure, figures
from outblas_lab.publish.drawing import SOFT, drawing
from outblas_lab.publish.palette import AGENT_COLOURS, shown_agents
from outblas_lab.publish.words import date_words
from pages.card import PICTURE_SIZE, QUIET, outer_ticks_within, picture


@drawing(PICTURE_SIZE)
def compare_svg(comparison: Comparison) -> str:
    """Return the curves of every split as SVG text."""
    from matplotlib.figure import Figure as Canvas

    made = {split: figures(comparison, split) for split in comparison.splits}
    low = max(0.0, math.floor(20 * min(f.low for of_split in made.values() for f in of_split.values())) / 20)
    canvas = Canvas(figsize=(640 / 72, 480 / 72))
    axes = canvas.subplots(1, len(made), sharey=True, squeeze=False)[0]
    canvas.subplots_adjust(left=0.12, right=0.74, top=0.71, bottom=0.12, wspace=0.12)
    for ax, (split, of_split) in zip(axes, made.items(), strict=True):
        ax.set(xlim=(0, len(comparison.budgets) - 1), ylim=(low, 1.0))
        _panel(ax, comparison, split, of_split)
    axes[0].set_ylabel("share of the best speed")
    canvas.text(0.43, 0.02, "measurements of a problem", ha="center", color=SOFT)
    last, budget = made[comparison.splits[-1]], comparison.budgets[-1]
    _name_ends(axes[-1], {agent: last[agent, budget].quality for agent in comparison.agents}, comparison.agents)
    words = [
        f"{split} {agent}: " + ", ".join(f"{of_split[agent, b].quality:.3f} at {b}" for b in comparison.budgets)
        for split, of_split in made.items()
        for agent in comparison.agents
    ]
    drawn = [
        (split, agent, budget, f.low, f.quality, f.high, comparison.meta["splits"][split].get("noise_floor"))
        for split, of_split in made.items()
        for (agent, budget), f in of_split.items()
    ]
    title = f"Agents on held-out problems of {comparison.meta['suite']}"
    where = f"Recording of {comparison.measured['gpu']}, {date_words(comparison.measured['date'])}."
    return picture(canvas, title, [where, *_key(comparison)], "Geometric means. " + "; ".join(words) + ".", drawn)


def _panel(ax: Any, comparison: Comparison, split: str, made: dict[tuple[str, int], Figure]) -> None:
    budgets, shown = comparison.budgets, shown_agents(comparison.agents)
    places = range(len(budgets))
    ax.set_title(split, loc="left", size=PICTURE_SIZE)
    outer_ticks_within(ax.set_xticks(places[::2], [str(budget) for budget in budgets[::2]]))
    ax.grid(axis="x", visible=False)
    floor = comparison.meta["splits"][split].get("noise_floor")
    if floor is not None:
        ax.axhline(floor, color=SOFT, linewidth=1, linestyle="--", gid="class-noise")
    for agent in comparison.agents:
        mine = [made[agent, b] for b in budgets]
        qualities = [f.quality for f in mine]
        if agent not in shown:
            ax.plot(places, qualities, color=QUIET, linewidth=1.3, zorder=1.8, gid="class-quiet")
            continue
        colour = AGENT_COLOURS[shown.index(agent)]
        low, high = [f.low for f in mine], [f.high for f in mine]
        ax.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0, gid="class-band")
        ax.plot(places, qualities, color=colour, clip_on=False, gid="class-line")


def _name_ends(ax: Any, ends: dict[str, float], agents: tuple[str, ...]) -> None:
    """Write the names beside the panel at equal distances, the best first, with a leader from each line's end."""
    (low, high), shown = ax.get_ylim(), shown_agents(agents)
    leader = {"arrowstyle": "-", "color": QUIET, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    for place, agent in enumerate(sorted(ends, key=lambda name: -ends[name])):
        at, end = 1 - place / max(len(ends) - 1, 8), (ends[agent] - low) / (high - low)
        name = ax.annotate(
            agent, (1, end), (1.2, at), xycoords="axes fraction", arrowprops=leader, va="center", gid="class-name"
        )
        name.arrow_patch.set_gid("class-leader")
        colour, weight = (AGENT_COLOURS[shown.index(agent)], "bold") if agent in shown else (SOFT, "normal")
        name.set(color=colour, weight=weight)


def _key(comparison: Comparison) -> list[str]:
    """Return the meaning of the axis, the bands and the dashed line in words."""
    floors = all("noise_floor" in about for about in comparison.meta["splits"].values())
    return [
        "1.00: the agent's kernel is the fastest recorded one, in the geometric mean.",
        f"A panel per kind of held-out problem. Bands: 95% intervals.{' Dashed: noise.' if floors else ''}",
    ]
