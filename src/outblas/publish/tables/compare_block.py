"""The README's block on the comparison of agents, from its result file alone."""

from __future__ import annotations

from pathlib import Path

from outblas.publish.words import split_words
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.compare_stats import best_agents, budget_words, figures, overall_regret

COMPARE_BEGIN, COMPARE_END = "<!-- compare:begin -->", "<!-- compare:end -->"
#: Beside the bench files; where it is not there nothing is published of it.
COMPARISON, PICTURE = "compare.parquet", "compare.svg"
#: The split whose table is the first; the others follow in the order of the file.
FIRST = "families"

_HEADING = "## Agents compared"
#: The section comes before this one; at the end of a README without it.
_BEFORE = "## Use\n"


def compare_block(comparison: Comparison, picture: str | None) -> str:
    """Of every split a table agents x budgets; who is best, the ``picture`` (its address in the README), where it comes
    from."""
    lines = [
        "Best recorded time over the best time found after so many measurements (0: the first proposal, unmeasured):",
        "geometric mean over problems, launch options and seeds, and half of its 95% interval over problems. Bold: the",
        "best of each column, and all whose interval overlaps its interval.",
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


def with_section(text: str) -> str:
    """A README's text with a section and empty markers for the block; as it is, where it has a marker."""
    if COMPARE_BEGIN in text or COMPARE_END in text:
        return text
    section = f"{_HEADING}\n\n{COMPARE_BEGIN}\n{COMPARE_END}\n"
    if _BEFORE in text:
        return text.replace(_BEFORE, f"{section}\n{_BEFORE}", 1)
    return f"{text.rstrip()}\n\n{section}"


def comparison_of(directory: Path) -> Path | None:
    """The comparison's result file in a directory of results, where it is there."""
    path = Path(directory) / COMPARISON
    return path if path.exists() else None
