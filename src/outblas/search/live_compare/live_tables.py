"""Figures of a live comparison: both tables, and where reinforcement learning pays.

A table is read as a comparison of agents, so its means, intervals and paired gains are those of
:mod:`outblas.search.compare.compare_stats`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from outblas.core.problem import Problem
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import Figure, Gain, best_agents, figures, paired_gains
from outblas.search.live_compare.live_result import LiveResult

#: (agent trained by reinforcement, the agent without it, the difference in words).
REINFORCED = (
    ("ppo", "regressor", "the policy over its own regressor"),
    ("knob", "random-legal", "the knob policy over chance"),
    ("knob", "regressor", "the knob policy over the regressor"),
)
#: Regimes of :func:`outblas.core.roofline.regime` without their size, in the order of the table.
REGIMES = ("launch", "memory", "compute")


def as_comparison(
    result: LiveResult, table: str, figure: str, problems: Collection[Problem] | None = None
) -> Comparison:
    """Return a table of a result as a comparison with one split, whose name is that of the table.

    Args:
        result: the result.
        table: ``same`` (the same candidates; agents have their plain names) or ``native`` (the agents' own spaces).
        figure: ``speedup`` or ``share``; it takes the place of the quality. A speed-up may be above 1.
        problems: problems to keep; None: all.
    """
    kept = {p.key for p in (result.problems if problems is None else problems)}
    names = {arm: arm.rpartition("@")[0] if table == "same" else arm for arm in result.meta[table]}
    rows = [row for row in result.rows if row["arm"] in names and row["problem"] in kept]
    listed, agents, budgets = [p for p in result.problems if p.key in kept], list(names), result.meta["budgets"]
    place = {p.key: i for i, p in enumerate(listed)}
    none = np.zeros(len(rows), np.int64)
    return Comparison(
        result.path, {**result.meta, "splits": {table: {}}, "suite": "unseen problems"}, (table,),
        tuple(names.values()), ("plain",), tuple(listed), tuple(budgets), none,
        np.array([agents.index(row["arm"]) for row in rows]), none, np.array([place[row["problem"]] for row in rows]),
        np.array([budgets.index(row["budget"]) for row in rows]), np.array([row["seed"] for row in rows]),
        np.array([row[figure] for row in rows]), np.array([row["found"] for row in rows]),
    )  # fmt: skip


def table_rows(result: LiveResult, table: str, figure: str, bold: str = "") -> list[list[str]]:
    """Return the head and the rows of a table as text: agent, a figure with half of its interval per budget, CPU time.

    The last column is the agent's own time for one proposal, in milliseconds.

    Args:
        result: the result.
        table: ``same`` or ``native``.
        figure: ``speedup`` or ``share``.
        bold: text around the best of each column, and around each whose interval overlaps it.
    """
    made = _figures(result, table, figure)
    budgets, agents = result.meta["budgets"], dict.fromkeys(agent for agent, _ in made)
    best = {b: {f.agent for f in (first, *level)} for b in budgets for first, level in (best_agents(made, b),)}

    def cell(agent: str, budget: int) -> str:
        found = made[agent, budget]
        around = bold if agent in best[budget] else ""
        return f"{around}{found.quality:.3f} ± {found.half_width:.3f}{around}"

    rows = [
        [agent, *(cell(agent, b) for b in budgets), f"{result.meta['costs'][arm]:.1f}"]
        for agent, arm in zip(agents, result.meta[table], strict=True)
    ]
    return [["agent", *map(str, budgets), "CPU ms"], *rows]


def best_lines(result: LiveResult) -> list[str]:
    """Return, for each number of measurements, the best agent with the same candidates, and those level with it."""
    made = _figures(result, "same", "speedup")
    lines = []
    for budget in result.meta["budgets"]:
        best, level = best_agents(made, budget)
        others = f"; intervals of {', '.join(f.agent for f in level)} overlap its own" if level else ""
        lines.append(f"{budget} measurements: {best.agent}, {best.quality:.3f} times the fastest rival{others}")
    return lines


def _figures(result: LiveResult, table: str, figure: str) -> dict[tuple[str, int], Figure]:
    return figures(as_comparison(result, table, figure), table)


def reinforcement_rows(result: LiveResult) -> list[list[str]]:
    """Return the head and the rows of a table on what reinforcement adds, by regime, with the same candidates.

    A cell is the paired gain in percent, its 95% interval over problems, and a word. The word is ``pays`` or ``costs``
    if the interval excludes 0, else ``level``. A regime of one problem has no interval, so it is left out. The list is
    empty without a pair of :data:`REINFORCED`.

    Args:
        result: the result.
    """
    agents = as_comparison(result, "same", "speedup").agents
    pairs = [pair for pair in REINFORCED if {pair[0], pair[1]} <= set(agents)]
    if not pairs:
        return []
    head = ["difference", "regime", "problems", *map(str, result.meta["budgets"])]
    rows = []
    for agent, without, words in pairs:
        for name, problems in _by_regime(result):
            part = as_comparison(result, "same", "speedup", problems)
            gains = paired_gains(part, "same", agent, without)
            said = f"{words}: `{agent}` over `{without}`"
            rows.append([said, name, str(len(problems)), *map(_gain_words, gains)])
    return [head, *rows]


def _by_regime(result: LiveResult) -> list[tuple[str, list[Problem]]]:
    """Return all problems, then those of each regime that has two or more."""
    kinds = {row["problem"]: row["regime"].partition("_")[0] for row in result.rows}
    named = {name: [p for p in result.problems if kinds[p.key] == name] for name in REGIMES}
    return [("all", list(result.problems)), *((name, found) for name, found in named.items() if len(found) > 1)]


def _gain_words(gain: Gain) -> str:
    word = "pays" if gain.low > 0 else "costs" if gain.high < 0 else "level"
    return f"{100 * gain.mean:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}] {word}"
