"""The table of a result of equal_budgets.py, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FORMAT = "outblas-equal-budgets-1"
#: How the names of Kernel Tuner's strategies begin, of which the best after the last budget is shown.
STRATEGY = "kt-"


def budget_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a result in Markdown: the table, then the paired gains, the answers and what is missing."""
    rows = {row["learner"]: row["figures"] for row in made["table"]}
    strategies = [name for name in rows if name.startswith(STRATEGY)]
    best = max(strategies, key=lambda name: [figure["mean"] for figure in rows[name].values()][-1], default=None)
    budgets = made["budgets"]
    yield f"| learner | {' | '.join(map(str, budgets))} | within 1% after {', '.join(map(str, budgets))} |"
    yield f"| --- |{' ---: |' * (len(budgets) + 1)}"
    for name, figures in rows.items():
        if name == best or name not in strategies:
            near = ", ".join(f"{figure['near']:.0%}" for figure in figures.values())
            words = f"Kernel Tuner, {name} (best of {len(strategies)})" if name == best else name
            yield f"| {words} | {' | '.join(_cells(figures))} | {near} |"
    yield ""
    for gain in made["gains"]:
        yield f"- `{gain['learner']}` over `{gain['over']}`: {', '.join(_cells(gain['figures']))}"
    for name, counts in made["answers"].items():
        yield f"- choices of `{name}`: {', '.join(f'{number} {word}' for word, number in counts.items())}"
    for name, number in made["missing"].items():
        yield f"- `{name}` lacks {number} of {len(made['problems'])} problems"


def _cells(figures: Mapping[Any, Mapping[str, float]]) -> list[str]:
    return [f"{each['mean']:.3f} ({each['low']:.3f} to {each['high']:.3f})" for each in figures.values()]
