"""The report page of a comparison of agents: curves, tables and regimes of every split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from outblas.publish.html.charts import Axis, Chart, Series, chart_html
from outblas.publish.html.definitions import Definition, definitions_html
from outblas.publish.html.figures import gpu_or_reference, round_ticks
from outblas.publish.html.shell import cards_html, copy_html, html_page, provenance_section, table
from outblas.publish.palette import AGENT_COLOURS, AGENT_DASHES, GREY, shown_agents
from outblas.publish.words import date_words, regime_words, searched_count, split_words
from outblas.records.results import PROVENANCE_FIELDS
from outblas.search.compare.compare_result import (
    Comparison,
    Figure,
    best_agents,
    budget_words,
    figures,
    mean_regret,
    overall_regret,
    regime_qualities,
)
from outblas.search.recipe_table import REWARD_NAMES

FigureByAgent = dict[tuple[str, int], Figure]


def render_comparison(comparison: Comparison) -> str:
    """Return the whole page as text; the same file gives the same text."""
    of_splits = {split: figures(comparison, split) for split in comparison.splits}
    charts = {split: curves(comparison, split, made) for split, made in of_splits.items()}
    gpu = str(comparison.measured.get("gpu", "unknown"))
    date = date_words(comparison.measured.get("date", "unknown"))
    origin = (
        f"<p class='origin replay'>The agents received <strong>recorded measurements of {escape(gpu)}, {escape(date)}"
        "</strong>. Nothing was timed for this page.</p>"
    )
    body = "\n".join(
        [
            definitions_html(_definitions(comparison)),
            _overall(comparison, of_splits),
            *(_section(comparison, split, made, charts[split], i) for i, (split, made) in enumerate(of_splits.items())),
            _provenance(comparison),
        ]
    )
    groups = [{"title": split, "figures": {"curve": chart.payload()}} for split, chart in charts.items()]
    title = f"OutBLAS agents compared: {comparison.meta['suite']} on {gpu}"
    return html_page(title, origin, body, {"provenance": comparison.provenance, "groups": groups})


def curves(comparison: Comparison, split: str, made: FigureByAgent) -> Chart:
    """Return quality against budget: a line and a band of the 95% interval per agent, four of them shown first.

    The noise floor of the split is a line, too, if the comparison has it.
    """
    budgets = comparison.budgets
    places = [float(i) for i in range(len(budgets))]
    shown = shown_agents(comparison.agents)
    bands, lines = [], []
    for i, agent in enumerate(comparison.agents):
        mine = [made[agent, b] for b in budgets]
        colour, dash = AGENT_COLOURS[i % len(AGENT_COLOURS)], AGENT_DASHES[i // len(AGENT_COLOURS) % len(AGENT_DASHES)]
        drawn = agent in shown
        low, high = [f.low for f in mine], [f.high for f in mine]
        bands.append(Series(agent, "band", colour, places, high, base=low, opacity=0.15, shown=drawn, named=False))
        tips = [
            f"{agent} after {b} measurements: {f.quality:.3f} ({f.low:.3f} to {f.high:.3f}), regret {f.regret:.2%}"
            for b, f in zip(budgets, mine, strict=True)
        ]
        lines.append(
            Series(agent, "line", colour, places, [f.quality for f in mine], tips=tips, dash=dash, shown=drawn)
        )
    floor = comparison.meta["splits"][split].get("noise_floor")
    if floor is not None:
        lines.append(Series("noise floor", "line", GREY, places, [floor] * len(places), dash="2 4", shown=True))
    lowest = min(f.low for f in made.values())
    bottom = max(0.0, math.floor(20 * lowest) / 20)
    return Chart(
        Axis("measurements", -0.3, len(budgets) - 0.7, [(p, str(b)) for p, b in zip(places, budgets, strict=True)]),
        Axis(
            "best time / time of the choice (geometric mean)",
            bottom,
            1.0,
            [(t, f"{t:g}") for t in round_ticks(bottom, 1.0)],
        ),
        [*bands, *lines],
    )


def _overall(comparison: Comparison, of_splits: dict[str, FigureByAgent]) -> str:
    ranked = overall_regret(list(of_splits.values()))
    lines = []
    for agent, regret in ranked:
        cost = comparison.meta["costs"][agent]
        each = [f"{mean_regret(made, agent):.2%}" for made in of_splits.values()]
        lines.append((agent, f"{regret:.2%}", *each, f"{cost['task_ms']:.1f}", f"{cost['prepare_s']:.1f}"))
    best = ranked[0]
    usual = next((pair for pair in ranked if pair[0] == "random"), ranked[-1])
    problems = sum(searched_count(comparison, split) for split in of_splits)
    cards = [
        ("geomean", best[0], "Best agent", f"mean regret <b>{best[1]:.2%}</b> over all splits"),
        ("usual", usual[0], "For comparison", f"mean regret <b>{usual[1]:.2%}</b> over all splits"),
        (
            "problems",
            str(problems),
            "Searched problems",
            f"in {len(of_splits)} splits, with and without PDL, {comparison.meta['seeds']} seeds",
        ),
    ]
    caption = f"Mean regret over budgets {budget_words(comparison.budgets)}, best agent first; cost in CPU time"
    head = ("Agent", "All splits", *(f"Split {s}" for s in of_splits), "ms per task", "s to prepare")
    is_agent = best[0] not in REWARD_NAMES  # the choices of a recipe have rewards in place of agents
    words = "This command tunes with the best agent:"
    use = copy_html(words, f"outblas tune --agent {best[0]} --suite grid1000") if is_agent else ""
    return (
        f"<section aria-labelledby='all'><h2 id='all'>All splits</h2>{cards_html(cards)}"
        f"{table(caption, head, lines, searched=False)}{use}</section>"
    )


def _section(comparison: Comparison, split: str, made: FigureByAgent, chart: Chart, index: int) -> str:
    budgets = comparison.budgets
    quality = [
        (a, *(f"{made[a, b].quality:.3f} ({made[a, b].low:.3f} to {made[a, b].high:.3f})" for b in budgets))
        for a in comparison.agents
    ]
    note = "Geometric mean and its 95% interval over problems. Tick the boxes to show more agents."
    winners = ("Budget", "Agent", "Regret", "Overlaps")
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>Split {escape(split)}</h2>",
        f"<p class='note'>{escape(split_words(comparison, split))}.</p>",
        chart_html(chart, index, "curve", "Quality by measurements", note),
        table("Quality and its 95% interval, by number b of measurements", _head(budgets), quality, searched=False),
        table("The best agent of each budget, and the agents whose intervals overlap with its own", winners,
              _winners(made, budgets), searched=False),
        "<h3>By regime</h3>",
        table("Quality by regime", ("Regime", "Problems", *_head(budgets)), _regimes(comparison, split)),
    ]  # fmt: skip
    return "\n".join([*parts, "</section>"])


def _head(budgets: Sequence[int]) -> tuple[str, ...]:
    return ("Agent", *(f"b = {b}" for b in budgets))


def _winners(made: FigureByAgent, budgets: Sequence[int]) -> list[tuple[Any, ...]]:
    lines = []
    for budget in budgets:
        best, level = best_agents(made, budget)
        lines.append((budget, best.agent, f"{best.regret:.2%}", ", ".join(f.agent for f in level) or "none"))
    return lines


def _regimes(comparison: Comparison, split: str) -> list[tuple[Any, ...]]:
    gpu = gpu_or_reference(str(comparison.measured.get("gpu", "")))
    found = regime_qualities(comparison, split, gpu)
    return [(regime_words(r), n, agent, *(f"{q:.3f}" for q in qs)) for r, n, agent, qs in found]


def _definitions(comparison: Comparison) -> list[Definition]:
    return [
        (
            "Task",
            "A problem and a launch option (without or with PDL). An agent proposes one candidate at a time and "
            "receives its recorded time. Every task starts from the agent as the training problems made it.",
        ),
        (
            "Quality",
            "Best recorded time of the task / time of the agent's choice after b measurements. The choice is the "
            "fastest that passed. While none has, it is the next proposal; so at b = 0 it is the first proposal, "
            "before any measurement. A choice that fails counts as the slowest recorded candidate.",
        ),
        (
            "Noise floor",
            "The quality of choosing the fastest recorded candidate, if the recording and the truth differ by the "
            "recorded noise. Agents above it cannot be told apart by this recording.",
        ),
        (
            "Every legal candidate",
            "Agent random-legal is also offered the candidates that the recording left out, since a model predicted "
            "them to be slow. Each counts as 1.35 times the fastest (1.2 on long calls), which flatters the agent.",
        ),
        ("Regret", "1 / geometric mean of the quality - 1: the time that is lost against the best recorded candidate."),
        (
            "Figures",
            "Geometric means over problems, launch options and seeds. Agents that draw, or learn by chance, ran with "
            f"{comparison.meta['seeds']} seeds, the others once.",
        ),
        ("Interval", "95% bootstrap over problems. Launch options and seeds of a problem are drawn together."),
        (
            "Split",
            "A way to hold problems out. Agents that learn across shapes, and the ranking model of the heuristic, were "
            "trained without the held-out problems.",
        ),
        (
            "PDL",
            "Programmatic dependent launch: a kernel starts while the one before it ends.",
        ),
        (
            "Cost",
            "CPU time of the agent alone. A training that an earlier run had kept is not counted in the seconds to "
            "prepare.",
        ),
        (
            "Catalogue",
            "The recorded candidates were chosen by measurements of all problems, held-out ones included. This choice "
            "is the same for all agents.",
        ),
    ]


def _provenance(comparison: Comparison) -> str:
    meta = comparison.meta
    facts: dict[str, Any] = {"suite": meta["suite"], "result file": comparison.path.name}
    facts |= {field: comparison.provenance.get(field) for field in PROVENANCE_FIELDS}
    facts |= {"recording": meta["recording"]["name"], "recording: sha256": meta["recording"].get("sha256")}
    facts |= {f"recording: {f}": v for f, v in comparison.measured.items() if comparison.provenance.get(f) != v}
    facts |= {key: meta[key] for key in ("seeds", "held_out", "split_seed", "sample", "splits") if key in meta}
    return provenance_section(facts)
