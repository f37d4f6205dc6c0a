"""The published picture of a comparison of agents: quality by measurements as SVG, a panel per split.

Four agents stand out, and their names stand at the ends of their lines. The others are grey.
"""

from __future__ import annotations

import math
from typing import Any

from outblas_lab.compare.compare_result import Comparison, Figure, figures
from outblas_lab.publish.drawing import QUIET, SOFT, drawing, picture
from outblas_lab.publish.palette import AGENT_COLOURS, GREY, shown_agents
from outblas_lab.publish.words import date_words

#: The least distance of two names, as a share of the height of a panel.
NAME_STEP = 0.055


@drawing()
def compare_svg(comparison: Comparison) -> str:
    """Return the curves of every split as SVG text."""
    from matplotlib.figure import Figure as Canvas

    made = {split: figures(comparison, split) for split in comparison.splits}
    low = max(0.0, math.floor(20 * min(f.low for of_split in made.values() for f in of_split.values())) / 20)
    canvas = Canvas(figsize=(960 / 72, 440 / 72))
    axes = canvas.subplots(1, len(made), sharey=True, squeeze=False)[0]
    canvas.subplots_adjust(left=0.085, right=0.905, top=0.77, bottom=0.13, wspace=0.42)
    for ax, (split, of_split) in zip(axes, made.items(), strict=True):
        ax.set(xlim=(0, len(comparison.budgets) - 1), ylim=(low, 1.0))
        _panel(ax, comparison, split, of_split)
    axes[0].set_ylabel("best time / time of the choice")
    canvas.text(0.5, 0.02, "measurements", ha="center", color=SOFT)
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
    where = f"recording of {comparison.measured['gpu']}, {date_words(comparison.measured['date'])}"
    title = f"Agents on held-out problems of {comparison.meta['suite']}"
    return picture(canvas, title, f"{where}; {_key(comparison)}", "Geometric means. " + "; ".join(words) + ".", drawn)


def _panel(ax: Any, comparison: Comparison, split: str, made: dict[tuple[str, int], Figure]) -> None:
    budgets, shown = comparison.budgets, shown_agents(comparison.agents)
    places = range(len(budgets))
    ax.set_title(f"split {split}", loc="left", size=13)
    ax.set_xticks(places, map(str, budgets))
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
        ax.fill_between(
            places,
            [f.low for f in mine],
            [f.high for f in mine],
            color=colour,
            alpha=0.15,
            linewidth=0,
            gid="class-band",
        )
        ax.plot(places, qualities, color=colour, clip_on=False, gid="class-line")
    _name_ends(ax, {agent: made[agent, budgets[-1]].quality for agent in shown}, shown)


def _name_ends(ax: Any, ends: dict[str, float], shown: tuple[str, ...]) -> None:
    """Write the names at the ends of the lines, moved apart, with a leader from each end."""
    low, high = ax.get_ylim()
    lowest = 1 + NAME_STEP
    for agent in sorted(ends, key=lambda name: -ends[name]):
        end = (ends[agent] - low) / (high - low)
        lowest = min(end, lowest - NAME_STEP)
        leader = {"arrowstyle": "-", "color": GREY, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        name = ax.annotate(
            agent, (1, end), (1.05, lowest), xycoords="axes fraction", arrowprops=leader, va="center", gid="class-name"
        )
        name.arrow_patch.set_gid("class-leader")
        name.set(color=AGENT_COLOURS[shown.index(agent)], weight="bold")


def _key(comparison: Comparison) -> str:
    """Return the meaning of bands and grey lines in words."""
    others = len(comparison.agents) - len(shown_agents(comparison.agents))
    grey = f"; grey: {others} other agent{'' if others == 1 else 's'}" if others else ""
    floors = all("noise_floor" in about for about in comparison.meta["splits"].values())
    return f"bands: 95% intervals{grey}{'; dashed: the noise floor of the recording' if floors else ''}"
