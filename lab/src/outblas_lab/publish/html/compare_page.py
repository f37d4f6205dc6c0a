"""The report page of a comparison of agents: curves, tables and regimes of every split."""

from __future__ import annotations

import math
from typing import Any

from outblas.records.results import PROVENANCE_FIELDS
from outblas_lab.compare.compare_result import (
    Comparison,
    Figure,
    best_agents,
    budget_words,
    figures,
    level_with,
    mean_regret,
    overall_regret,
    regime_qualities,
)
from outblas_lab.compare.measured_cost import UNITS
from outblas_lab.publish.drawing import drawing
from outblas_lab.publish.html.charts import WIDE, Chart
from outblas_lab.publish.html.page import page_text
from outblas_lab.publish.html.run_data import gpu_or_reference
from outblas_lab.publish.palette import AGENT_COLOURS, AGENT_STYLES, GREY, shown_agents
from outblas_lab.publish.words import date_words, regime_words, searched_count, split_words
from outblas_lab.recipe.recipe_table import REWARD_NAMES

FigureByAgent = dict[tuple[str, int], Figure]


def render_comparison(comparison: Comparison) -> str:
    """Return the whole page as text; the same file gives the same text."""
    of_splits = {split: figures(comparison, split) for split in comparison.splits}
    splits = [_split(comparison, split, made) for split, made in of_splits.items()]
    ranked = overall_regret(list(of_splits.values()))
    best = ranked[0]
    groups = [{"title": split["name"], "figures": {"curve": split["chart"].payload()}} for split in splits]
    return page_text(
        "compare.html.j2",
        {"provenance": comparison.provenance, "groups": groups},
        comparison=comparison,
        gpu_name=str(comparison.measured.get("gpu", "unknown")),
        date=date_words(comparison.measured.get("date", "unknown")),
        facts=_facts(comparison),
        best=best,
        level=level_with(list(of_splits.values()), best[0]),
        usual=next((pair for pair in ranked if pair[0] == "random"), ranked[-1]),
        searched=sum(searched_count(comparison, split) for split in of_splits),
        budgets=budget_words(comparison.budgets),
        unit=UNITS[comparison.unit],
        budget_heads=tuple(f"b = {b}" for b in comparison.budgets),
        overall=_overall(comparison, of_splits, ranked),
        splits=splits,
        # the choices of a recipe have rewards in place of agents
        use=None if best[0] in REWARD_NAMES else f"outblas tune --agent {best[0]} --suite grid1000",
    )


@drawing()
def curves(comparison: Comparison, split: str, made: FigureByAgent) -> Chart:
    """Return quality against budget: a line and a band of the 95% interval per agent, four of them shown first.

    The noise floor of the split is a line, too, if the comparison has it.
    """
    chart = Chart(UNITS[comparison.unit], "best time / time of the choice (geometric mean)", WIDE)
    budgets, shown = comparison.budgets, shown_agents(comparison.agents)
    places = range(len(budgets))
    for i, agent in enumerate(comparison.agents):
        mine = [made[agent, b] for b in budgets]
        colour = AGENT_COLOURS[i % len(AGENT_COLOURS)]
        style = AGENT_STYLES[i // len(AGENT_COLOURS) % len(AGENT_STYLES)]
        low, high = [f.low for f in mine], [f.high for f in mine]
        band = chart.axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        chart.add(agent, [band], colour, "", shown=agent in shown)
        unit = UNITS[comparison.unit]
        tips = [
            f"{agent} after {b} {unit}: {f.quality:.3f} ({f.low:.3f} to {f.high:.3f}), regret {f.regret:.2%}"
            for b, f in zip(budgets, mine, strict=True)
        ]
        line = chart.axes.plot(places, [f.quality for f in mine], style, color=colour)
        chart.add(agent, line, colour, "line" if style == "-" else "dashed", tips=tips, shown=agent in shown)
    floor = comparison.meta["splits"][split].get("noise_floor")
    if floor is not None:
        line = chart.axes.plot(places, [floor] * len(budgets), ":", color=GREY)
        chart.add("noise floor", line, GREY, "dashed")
    bottom = max(0.0, math.floor(20 * min(f.low for f in made.values())) / 20)
    chart.axes.set(xlim=(-0.3, len(budgets) - 0.7), ylim=(bottom, 1.0))
    chart.axes.set_xticks(places, map(str, budgets))
    return chart


def _overall(
    comparison: Comparison, of_splits: dict[str, FigureByAgent], ranked: list[tuple[str, float]]
) -> list[tuple[str, ...]]:
    lines = [("Agent", "All splits", *(f"Split {split}" for split in of_splits), "ms per task", "s to prepare")]
    for agent, regret in ranked:
        cost = comparison.meta["costs"][agent]
        each = [f"{mean_regret(made, agent):.2%}" for made in of_splits.values()]
        lines.append((agent, f"{regret:.2%}", *each, f"{cost['task_ms']:.1f}", f"{cost['prepare_s']:.1f}"))
    return lines


def _split(comparison: Comparison, split: str, made: FigureByAgent) -> dict[str, Any]:
    budgets = comparison.budgets
    gpu = gpu_or_reference(str(comparison.measured.get("gpu", "")))
    winners = [(budget, *best_agents(made, budget)) for budget in budgets]
    return {
        "name": split,
        "words": split_words(comparison, split),
        "chart": curves(comparison, split, made),
        "quality": [
            (a, *(f"{made[a, b].quality:.3f} ({made[a, b].low:.3f} to {made[a, b].high:.3f})" for b in budgets))
            for a in comparison.agents
        ],
        "winners": [
            (budget, best.agent, f"{best.regret:.2%}", ", ".join(f.agent for f in level) or "none")
            for budget, best, level in winners
        ],
        "regimes": [
            (regime_words(r), n, agent, *(f"{q:.3f}" for q in qualities))
            for r, n, agent, qualities in regime_qualities(comparison, split, gpu)
        ],
    }


def _facts(comparison: Comparison) -> dict[str, Any]:
    meta = comparison.meta
    facts: dict[str, Any] = {"suite": meta["suite"], "result file": comparison.path.name}
    facts |= {field: comparison.provenance.get(field) for field in PROVENANCE_FIELDS}
    facts |= {"recording": meta["recording"]["name"], "recording: sha256": meta["recording"].get("sha256")}
    facts |= {f"recording: {f}": v for f, v in comparison.measured.items() if comparison.provenance.get(f) != v}
    return facts | {key: meta[key] for key in ("seeds", "held_out", "split_seed", "sample", "splits") if key in meta}
