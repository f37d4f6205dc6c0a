"""The report page of a comparison of agents: curves, tables and regimes of every split."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from outblas.core.roofline import GPUS
from outblas.publish.html.shell import chart, date_text, how_to_read, html_page, provenance_section, table
from outblas.publish.palette import AGENT_COLOURS, AGENT_DASHES, GRID, INK
from outblas.publish.words import split_words
from outblas.records.results import PROVENANCE_FIELDS
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import (
    Figure,
    best_agents,
    budget_words,
    figures,
    mean_regret,
    overall_regret,
    regime_qualities,
)

FigureByAgent = dict[tuple[str, int], Figure]


def render_comparison(comparison: Comparison) -> str:
    """The whole page as text; the same for the same file.

    Raises:
        ToolchainMissing: without plotly.
    """
    of_splits = {split: figures(comparison, split) for split in comparison.splits}
    gpu = str(comparison.measured.get("gpu", "unknown"))
    title = f"OutBLAS agents compared: {comparison.meta['suite']} on {gpu}"
    date = date_text(comparison.measured.get("date", "unknown"))
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1><p class='origin replay'>Agents were answered from <strong>recorded "
            f"measurements of {escape(gpu)}, {escape(date)}</strong>. Nothing was timed for this page.</p></header>",
            "<main>",
            _overall(comparison, of_splits),
            *(_section(comparison, split, made, i) for i, (split, made) in enumerate(of_splits.items())),
            _method(comparison),
            _provenance(comparison),
            "</main>",
            "<noscript><p class='note'>The charts need JavaScript; the tables do not.</p></noscript>",
        ]
    )
    groups = [{"title": split, "figures": {"curve": curves(comparison, made)}} for split, made in of_splits.items()]
    return html_page(title, body, {"provenance": comparison.provenance, "groups": groups})


def curves(comparison: Comparison, made: FigureByAgent) -> dict[str, Any]:
    """Quality against budget as a Plotly figure: a line and a band of the 95% interval per agent."""
    data: list[dict[str, Any]] = []
    x = [str(b) for b in comparison.budgets]
    for i, agent in enumerate(comparison.agents):
        mine = [made[agent, b] for b in comparison.budgets]
        colour, dash = AGENT_COLOURS[i % len(AGENT_COLOURS)], AGENT_DASHES[i // len(AGENT_COLOURS) % len(AGENT_DASHES)]
        quiet = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "legendgroup": agent, "showlegend": False}
        edge = {"width": 0, "color": colour}
        band = {"fill": "tonexty", "fillcolor": _faint(colour)}
        data += [
            {**quiet, "x": x, "y": [f.low for f in mine], "line": edge},
            {**quiet, "x": x, "y": [f.high for f in mine], "line": edge, **band},
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": agent,
                "legendgroup": agent,
                "x": x,
                "y": [f.quality for f in mine],
                "text": [f"{f.low:.3f} to {f.high:.3f}, regret {f.regret:.2%}" for f in mine],
                "hovertemplate": "%{y:.3f} (%{text})<extra>" + agent + "</extra>",
                "line": {"color": colour, "width": 2.5, "dash": dash},
            },
        ]
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True}
    layout = {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 12, "t": 36, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, "type": "category", "title": {"text": "measurements"}},
        "yaxis": {**axis, "title": {"text": "best time / found time (geometric mean)"}},
    }
    return {"data": data, "layout": layout}


def _overall(comparison: Comparison, of_splits: dict[str, FigureByAgent]) -> str:
    lines = []
    for agent, regret in overall_regret(list(of_splits.values())):
        cost = comparison.meta["costs"][agent]
        each = [f"{mean_regret(made, agent):.2%}" for made in of_splits.values()]
        lines.append((agent, f"{regret:.2%}", *each, f"{cost['task_ms']:.1f}", f"{cost['prepare_s']:.1f}"))
    caption = f"Mean regret over budgets {budget_words(comparison.budgets)}, best agent first; cost in CPU time"
    head = ("Agent", "All splits", *(f"Split {s}" for s in of_splits), "ms per task", "s to prepare")
    return f"<section aria-labelledby='all'><h2 id='all'>Overall</h2>{table(caption, head, lines)}</section>"


def _section(comparison: Comparison, split: str, made: FigureByAgent, index: int) -> str:
    budgets = comparison.budgets
    quality = [
        (a, *(f"{made[a, b].quality:.3f} ({made[a, b].low:.3f} to {made[a, b].high:.3f})" for b in budgets))
        for a in comparison.agents
    ]
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>Split {escape(split)}</h2>",
        f"<p class='note'>{escape(split_words(comparison, split))}.</p>",
        chart(index, "curve", "Quality by measurements", "Geometric mean and its 95% interval over problems."),
        table("Quality and its 95% interval after so many measurements", _head(budgets), quality),
        table("The best agent of each budget", ("Budget", "Agent", "Regret", "Overlaps"), _winners(made, budgets)),
        "<h3>By regime</h3>",
        table("Quality by regime", ("Regime", "Problems", *_head(budgets)), _regimes(comparison, split), limited=True),
    ]
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
    name = str(comparison.measured.get("gpu", "")).lower()
    gpu = next((gpu for short, gpu in GPUS.items() if short in name), next(iter(GPUS.values())))
    return [(r, n, agent, *(f"{q:.3f}" for q in qs)) for r, n, agent, qs in regime_qualities(comparison, split, gpu)]


def _method(comparison: Comparison) -> str:
    points = [
        "A task is a problem and a launch option (without PDL, with PDL); an agent is asked for one of its candidates "
        "at a time and told the recorded answer. Every task starts from the agent as the training problems made it.",
        "Quality: best recorded time of the task / best time found so far. Budget 0: the first proposal, unmeasured. "
        "A candidate that failed counts as a measurement; while nothing has passed, quality is that of the slowest "
        "recorded candidate.",
        "Figures are geometric means over problems, launch options and seeds. Regret: 1 / that mean - 1.",
        "Interval: 95% bootstrap over problems; launch options and seeds of a problem are drawn together.",
        f"Agents that draw, or learn by chance, ran with {comparison.meta['seeds']} seeds, others once.",
        "Agents that learn across shapes, the heuristic's ranking model among them, were trained without what is held "
        "out. A training that was kept from an earlier run is not counted in the seconds to prepare.",
        "Which kernels the catalogue holds, and which of them were recorded where, goes by measurements of all "
        "problems; that is the same for all agents.",
    ]
    return how_to_read(points)


def _provenance(comparison: Comparison) -> str:
    meta = comparison.meta
    facts: dict[str, Any] = {"suite": meta["suite"], "result file": comparison.path.name}
    facts |= {field: comparison.provenance.get(field) for field in PROVENANCE_FIELDS}
    facts |= {"recording": meta["recording"]["name"]}
    facts |= {f"recording: {f}": v for f, v in comparison.measured.items() if comparison.provenance.get(f) != v}
    facts |= {key: meta[key] for key in ("seeds", "held_out", "split_seed", "sample", "splits") if key in meta}
    return provenance_section(facts)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
