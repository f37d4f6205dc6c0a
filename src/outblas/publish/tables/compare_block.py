"""The block of the agents' page on their comparison, from its result file alone."""

from __future__ import annotations

from pathlib import Path

from outblas.publish.words import split_words
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import best_agents, budget_words, figures, overall_regret

#: Beside the bench files; without it nothing is published of a comparison.
COMPARISON, PICTURE = "compare.parquet", "compare.svg"
#: The split whose table is the first; the others follow in the order of the file.
FIRST = "families"


def compare_block(comparison: Comparison, picture: str | None) -> str:
    """Return, in Markdown, a table of agents and budgets for every split, the best agent, and the source of the
    figures.

    Args:
        comparison: the content of a result file of ``outblas compare``.
        picture: address of the picture, seen from the page; None leaves it out.
    """
    lines = [
        "Each figure is the best recorded time over the best time that the agent found, so 1 is perfect.",
        "A column is a number of measurements per problem; 0 is the first proposal, unmeasured.",
        "It is a geometric mean over problems, launch options and seeds, with half of its 95% interval over problems.",
        "Bold marks the best of each column, and every agent whose interval overlaps the best one's.",
    ]
    for split in sorted(comparison.splits, key=lambda name: name != FIRST):
        lines += ["", f"Split *{split}*: {split_words(comparison, split)}.", "", *_table(comparison, split)]
    (name, regret), *_ = overall_regret([figures(comparison, s) for s in comparison.splits])
    lines += [
        "",
        f"Lowest mean regret (1 / geometric mean - 1) over budgets {budget_words(comparison.budgets)} and all splits "
        f"({', '.join(comparison.splits)}): `{name}`, {regret:.2%}.",
        *(["", f"![Quality of every agent by measurements]({picture})"] if picture else []),
        "",
        f"Recording of {comparison.measured['gpu']}, {str(comparison.measured['date'])[:10]}; agents of commit "
        f"{comparison.provenance['commit']}.",
    ]
    return "\n".join(lines)


def _table(comparison: Comparison, split: str) -> list[str]:
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
