"""The report page of a live comparison of agents: curves and both tables, and where reinforcement pays."""

from __future__ import annotations

from html import escape
from typing import Any

from outblas.publish.html.charts import Chart, chart_html
from outblas.publish.html.compare_page import curves
from outblas.publish.html.definitions import Definition, definitions_html
from outblas.publish.html.shell import html_page, provenance_section, table
from outblas.publish.words import date_words
from outblas.records.results import PROVENANCE_FIELDS
from outblas.search.compare.compare_stats import figures
from outblas.search.live_compare.live_arms import SPACES
from outblas.search.live_compare.live_result import LiveResult
from outblas.search.live_compare.live_tables import as_comparison, best_lines, reinforcement_rows, table_rows

_SPEEDUP, _SHARE = "Speed-up over the fastest rival", "Share of the best known"
_DEFINITIONS: list[Definition] = [
    (
        _SPEEDUP,
        "Time of the fastest rival / time of the agent's choice after a number of measurements. After all searches of "
        "a problem, all choices and rivals were timed together in new rounds.",
    ),
    (
        _SHARE,
        "Time of the fastest kernel that any agent chose on the problem / time of the choice. A choice that failed a "
        "proof counts as the slowest kernel of the problem that was judged.",
    ),
    ("Figures", "Geometric means over problems and seeds, ± half of their 95% interval over problems."),
    ("CPU ms", "The agent's own time for one proposal, in milliseconds."),
]


def render_live(result: LiveResult) -> str:
    """Return the whole page as text; the same file gives the same text."""
    meta, gpu = result.meta, str(result.provenance["gpu"])
    tables = [name for name in ("same", "native") if meta[name]]
    charts = {name: _chart(result, name) for name in tables}
    date = date_words(result.provenance["date"])
    origin = f"<p class='origin'>Measured on <strong>{escape(gpu)}, {escape(date)}</strong>.</p>"
    if meta["rehearsal"]:
        origin = (
            f"<p class='origin replay'>A rehearsal on <strong>{escape(meta['device'])}</strong>: no figure was "
            "measured for this page.</p>"
        )
    sections = [_section(result, name, charts[name], i) for i, name in enumerate(tables)]
    body = "\n".join([definitions_html(_DEFINITIONS), *sections, _reinforcement(result), _provenance(result)])
    groups = [{"title": name, "figures": {"curve": chart.payload()}} for name, chart in charts.items()]
    return html_page(f"OutBLAS agents live on {gpu}", origin, body, {"provenance": result.provenance, "groups": groups})


def _chart(result: LiveResult, name: str) -> Chart:
    shares = as_comparison(result, name, "share")
    return curves(shares, name, figures(shares, name))


def _section(result: LiveResult, name: str, chart: Chart, index: int) -> str:
    """Return the section of one table: its curves, then its speed-ups and shares."""
    space = result.meta["space"]
    title = {"same": "The same candidates for all", "native": "Each agent in its own space"}[name]
    note = f"Candidates: {SPACES.get(space, space)}." if name == "same" else "Each agent has the space of its name."
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>{escape(title)}</h2>",
        f"<p class='note'>{escape(note)} {len(result.problems)} unseen problems.</p>",
        chart_html(chart, index, "curve", f"{_SHARE}, by measurements", "Tick the boxes to show more agents."),
    ]
    for figure, words in (("speedup", _SPEEDUP), ("share", _SHARE)):
        (_, *budgets, cost), *rows = table_rows(result, name, figure)
        head = ("Agent", *(f"b = {b}" for b in budgets), cost)
        parts.append(table(f"{words}, after b measurements", head, rows, searched=False))
    if name == "same":
        parts += ["<ul>", *(f"<li>{escape(line)}.</li>" for line in best_lines(result)), "</ul>"]
    return "\n".join([*parts, "</section>"])


def _reinforcement(result: LiveResult) -> str:
    """Return the section on what reinforcement adds; empty without such a pair of agents."""
    rows = reinforcement_rows(result)
    if not rows:
        return ""
    (_, _, _, *budgets), *lines = rows
    head = ("Meaning", "Regime", "Problems", *(f"b = {b}" for b in budgets))
    plain = [[line[0].replace("`", ""), *line[1:]] for line in lines]
    caption = "The paired gain in percent with its 95% interval over problems, with the same candidates"
    found = table(caption, head, plain, searched=False)
    return f"<section aria-labelledby='gain'><h2 id='gain'>Where reinforcement pays</h2>{found}</section>"


def _provenance(result: LiveResult) -> str:
    meta, totals = result.meta, result.meta["totals"]
    facts: dict[str, Any] = {"result file": result.path.name}
    facts |= {field: result.provenance.get(field) for field in PROVENANCE_FIELDS}
    facts |= {"measurements of agents": totals["measurements"], "kernels": totals["kernels"]}
    facts |= {"GPU seconds": totals["gpu_s"], "seeds": meta["seeds"], "seed of the problems": meta["problem_seed"]}
    facts |= {f"without figures: {problem}": why for problem, why in meta["left_out"].items()}
    return provenance_section(facts)
