"""The block of the agents' page on their comparison, from its result file alone.

A method is credited only with what its ablation shows: the agent with it over the agent without it, on the same
problems.
"""

from __future__ import annotations

from pathlib import Path

from outblas.publish.words import split_words
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import (
    best_agents,
    budget_words,
    figures,
    noise_regret,
    overall_regret,
    paired_gains,
)

#: Beside the bench files; without it nothing is published of a comparison.
COMPARISON, PICTURE = "compare.parquet", "compare.svg"
#: The split whose table is the first; the others follow in the order of the file.
FIRST = "families"
#: (agent, the same agent without one part, that part in words).
ABLATIONS = (
    ("ppo", "regressor", "reinforcement learning"),
    ("random", "random-legal", "the ranking model's cut of the recording"),
)


def compare_block(comparison: Comparison, picture: str | None) -> str:
    """Return, in Markdown, a table of agents and budgets for every split, the best agent, and the source of the
    figures.

    Args:
        comparison: the content of a result file of ``outblas compare``.
        picture: address of the picture, seen from the page; None leaves it out.
    """
    lines = [
        "Each figure is the best recorded time over the time of the agent's choice, so 1 is perfect.",
        "A column is a number of measurements per problem. Column 0 is the choice before any measurement, column 1 the "
        "choice after one: that kernel if it passed, else the next proposal.",
        "It is a geometric mean over problems, launch options and seeds, with half of its 95% interval over problems.",
        "Bold marks the best of each column, and every agent whose interval overlaps the best one's.",
    ]
    for split in sorted(comparison.splits, key=lambda name: name != FIRST):
        lines += ["", f"Split *{split}*: {split_words(comparison, split)}.", "", *quality_table(comparison, split)]
    lines += [
        "", *_overall(comparison), *_ablations(comparison),
        *(["", f"![Quality of every agent by measurements]({picture})"] if picture else []),
        "", _source(comparison),
    ]  # fmt: skip
    return "\n".join(lines)


def _overall(comparison: Comparison) -> list[str]:
    """Return the agent with the lowest mean regret, and those that the noise does not tell apart from it."""
    ranked = overall_regret([figures(comparison, s) for s in comparison.splits])
    (name, regret), noise = ranked[0], noise_regret(comparison)
    lines = [
        f"Lowest mean regret (1 / geometric mean - 1) over budgets {budget_words(comparison.budgets)} and all splits "
        f"({', '.join(comparison.splits)}): `{name}`, {regret:.2%}."
    ]
    if noise is not None:
        level = [f"`{other}`" for other, found in ranked[1:] if found - regret < noise]
        told = f"Not told apart from it: {', '.join(level)}." if level else "All others are further behind than that."
        lines.append(
            f"The noise floor is a regret of {noise:.2%}: so far from the truth is the choice of the fastest recorded "
            f"candidate, since recorded times are noisy. {told}"
        )
    return lines


def _ablations(comparison: Comparison) -> list[str]:
    """Return a table of what single methods add, each over the agent without it; empty without such pairs."""
    pairs = [found for found in ABLATIONS if {found[0], found[1]} <= set(comparison.agents)]
    if not pairs:
        return []
    lines = [
        "",
        "What a method adds: the mean gain of the agent with it over the same agent without it, problem by problem, "
        "and its 95% interval, in percent.",
        "",
        "| method | split | " + " | ".join(f"{b}" for b in comparison.budgets) + " |",
        "| --- | --- |" + " ---: |" * len(comparison.budgets),
    ]
    for agent, without, method in pairs:
        for split in sorted(comparison.splits, key=lambda name: name != FIRST):
            gains = paired_gains(comparison, split, agent, without)
            cells = [f"{100 * g.mean:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" for g in gains]
            lines.append(f"| {method}: `{agent}` over `{without}` | {split} | {' | '.join(cells)} |")
    return lines


def _source(comparison: Comparison) -> str:
    sha = comparison.meta["recording"].get("sha256")
    named = f" (SHA-256 {sha[:16]})" if sha else ""
    return (
        f"Recording of {comparison.measured['gpu']}, {str(comparison.measured['date'])[:10]}{named}; agents of commit "
        f"{comparison.provenance['commit']}."
    )


def quality_table(comparison: Comparison, split: str) -> list[str]:
    """Return the lines of a table of agents and budgets, with the best of each column in bold."""
    made, budgets = figures(comparison, split), comparison.budgets
    best = {budget: best_agents(made, budget) for budget in budgets}
    lines = ["| agent | " + " | ".join(f"{b}" for b in budgets) + " |", "| --- |" + " ---: |" * len(budgets)]
    for agent in comparison.agents:
        cells = []
        for budget in budgets:
            first, level = best[budget]
            cell = f"{made[agent, budget].quality:.3f} ± {made[agent, budget].half_width:.3f}"
            cells.append(f"**{cell}**" if agent in {f.agent for f in (first, *level)} else cell)
        lines.append(f"| {agent} | " + " | ".join(cells) + " |")
    return lines


def comparison_of(directory: Path) -> Path | None:
    """Return the comparison's result file in a folder of results; None if it has none."""
    path = Path(directory) / COMPARISON
    return path if path.exists() else None
