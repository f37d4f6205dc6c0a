"""Blocks on agents, from result files alone: their comparison, learning across GPUs, and the published recipe.

A method is credited only with what its ablation shows: the agent with it over the agent without it, on the same
problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outblas_lab.compare.compare_result import (
    Comparison,
    best_agents,
    budget_words,
    figures,
    noise_regret,
    overall_regret,
    paired_gains,
    read_comparison,
)
from outblas_lab.compare.measured_cost import UNITS
from outblas_lab.compare.splits import SOURCES, arm_parts
from outblas_lab.publish.words import split_words
from outblas_lab.recipe.recipe_table import read_recipe, recipe_notes, recipe_rows
from pages.table_words import NOT_PUBLISHED, table_lines

#: Beside the bench files; without it nothing is published of a comparison.
COMPARISON, PICTURE = "compare.parquet", "compare.svg"
#: Of the recording that no model chose, by measurements and by time of the GPU.
UNCUT = ("compare_uncut.parquet", "compare_uncut_ms.parquet")
#: The split whose table is the first; the others follow in the order of the file.
FIRST = "families"
#: (agent, the same agent without one part, that part in words).
ABLATIONS = (
    ("ppo", "regressor", "reinforcement learning"),
    ("random", "random-legal", "the ranking model's cut of the recording"),
)
#: The same where nothing was cut: each method over a simpler one.
UNCUT_ABLATIONS = (
    ("regressor", "nearest", "a network over the nearest shape's winners"),
    ("regressor", "heuristic", "a network over the fitted cost model"),
    ("ppo", "regressor", "reinforcement learning"),
    ("surrogate", "regressor", "Bayesian optimization on a model of all shapes"),
    ("kt-bayes", "random", "Bayesian optimization of one shape"),
    ("tpe", "random", "a tree-structured Parzen estimator"),
    ("kt-genetic", "random", "a genetic algorithm"),
    ("evolution", "random", "mutation of the best"),
    ("examples/successive_halving.py", "random", "successive halving"),
)


def compare_block(
    comparison: Comparison, picture: str | None, ablations: Sequence[tuple[str, str, str]] = ABLATIONS
) -> str:
    """Return, in Markdown, a table of agents and budgets for every split, the best agent, and the source.

    Args:
        picture: address of the picture, seen from the page; None leaves it out.
        ablations: as :data:`ABLATIONS`; those whose agents were compared are shown.
    """
    lines = [
        "Each figure is the best recorded time over the time of the agent's choice, so 1 is perfect.",
        _columns(comparison.unit),
        "It is a geometric mean over problems, launch options and seeds, with half of its 95% interval over problems.",
        "Bold marks the best of each column, and every agent whose interval overlaps the best one's.",
    ]
    for split in sorted(comparison.splits, key=lambda name: name != FIRST):
        lines += ["", f"Split *{split}*: {split_words(comparison, split)}.", "", *quality_table(comparison, split)]
    lines += [
        "", *_overall(comparison), *_ablations(comparison, ablations),
        *(["", f"![Quality of every agent by measurements]({picture})"] if picture else []),
        "", _source(comparison),
    ]  # fmt: skip
    return "\n".join(lines)


def _columns(unit: str) -> str:
    if unit != "measurements":
        return f"A column is a budget for each problem in {UNITS[unit]}: what its measurements would take, by a model."
    return (
        "A column is a number of measurements per problem. Column 0 is the choice before any measurement, column 1 the "
        "choice after one: that kernel if it passed, else the next proposal."
    )


def uncut_block(folder: Path) -> str:
    """Return the comparisons on the recording that no model chose; one line without them.

    Raises:
        RecordError: a file cannot be read.
    """
    found = [path for path in (folder / name for name in UNCUT) if path.exists()]
    made = [f"{compare_block(read_comparison(path), None, UNCUT_ABLATIONS)}\n\n(`{path.as_posix()}`)" for path in found]
    return "\n\n".join(made) or NOT_PUBLISHED


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


def _ablations(comparison: Comparison, ablations: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a table of what single methods add, each over the agent without it; empty without such pairs."""
    pairs = [found for found in ablations if {found[0], found[1]} <= set(comparison.agents)]
    if not pairs:
        return []
    lines = [
        "",
        "What a method adds: the mean gain of the agent with it over the same agent without it, problem by problem, "
        "and its 95% interval, in percent.",
        "",
        *table_lines(["method", "split", *comparison.budgets], 2, []),
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
    rows = []
    for agent in comparison.agents:
        cells = []
        for budget in budgets:
            first, level = best[budget]
            cell = f"{made[agent, budget].quality:.3f} ± {made[agent, budget].half_width:.3f}"
            cells.append(f"**{cell}**" if agent in {f.agent for f in (first, *level)} else cell)
        rows.append([agent, *cells])
    return table_lines(["agent", *budgets], 1, rows)


def comparison_of(directory: Path) -> Path | None:
    """Return the comparison's result file in a folder of results; None if it has none."""
    path = Path(directory) / COMPARISON
    return path if path.exists() else None


#: Beside the bench files of the judged GPU; a GPU without it has no table.
ACROSS = "across.parquet"
#: (arm, arm that it is compared with, the difference in words).
PAIRS = (
    ("regressor@other", "heuristic@other", "learning on the other GPU over scaling the cost model"),
    ("regressor@other", "nearest@other", "learning on the other GPU over its nearest shape"),
    ("regressor@other-all", "regressor@other", "having seen the shape on the other GPU"),
    ("regressor@both", "regressor@own", "the other GPU's problems beside the judged GPU's"),
    ("regressor@own", "regressor@other", "the judged GPU's problems over the other's"),
    ("ppo@other", "regressor@other", "reinforcement learning on the other GPU"),
)
#: The arm that a new GPU gets, and the quality that it should have without a measurement.
NEW_GPU, AIM = "regressor@other", 0.965


def across_files(results: Path) -> list[Path]:
    """Return the result files of all judged GPUs, sorted by the GPU's folder; empty if nothing was compared."""
    return sorted(results.glob(f"*/{ACROSS}"))


def across_block(files: list[Path]) -> str:
    """Return, in Markdown, the tables of each judged GPU and the paired gains.

    Raises:
        RecordError: a file cannot be read.
    """
    lines = [
        "Each figure is the best recorded time over the time of the agent's choice, so 1 is perfect.",
        "A column is a number of measurements on the judged GPU.",
        "The word after the agent's name says what it learned from. No learner saw a judged shape on any GPU, except "
        "with `other-all`: it saw the shape on the other GPU.",
    ]
    for path in files:
        lines += ["", *_judged(read_comparison(path))]
    return "\n".join(lines)


def _judged(comparison: Comparison) -> list[str]:
    across = comparison.meta["across"]
    title = f"Judged on {comparison.measured['gpu']}; the other GPU is {across['provenance']['gpu']}."
    lines = [f"**{title}**"]
    for split in comparison.splits:
        size, learned = comparison.meta["splits"][split], across["learned"][split]
        used = [name for name in SOURCES if any(arm_parts(agent)[1] == name for agent in comparison.agents)]
        counts = ", ".join(f"{learned[name]} of `{name}`" for name in used)
        lines += [
            "", f"Split *{split}*: {size['searched']} problems searched. Problems to learn from: {counts}.",
            "", *quality_table(comparison, split), *_gains(comparison, split),
        ]  # fmt: skip
    lines += ["", *_missed(comparison)]
    noise = noise_regret(comparison)
    if noise is not None:
        lines += ["", f"The noise floor of the judged recording is a regret of {noise:.2%}."]
    return lines


def _missed(comparison: Comparison) -> Iterator[str]:
    """Yield in words the splits on which the arm of a new GPU misses its aim, or is surely behind a plainer one."""
    if NEW_GPU not in comparison.agents or 0 not in comparison.budgets:
        return
    found = {split: figures(comparison, split)[NEW_GPU, 0] for split in comparison.splits}
    each = ", ".join(f"{figure.quality:.3f} on *{split}*" for split, figure in found.items())
    mean = sum(figure.quality for figure in found.values()) / len(found)
    missed = " and ".join(f"*{split}*" for split, figure in found.items() if figure.quality < AIM)
    held = f"It is missed on {missed}." if missed else "It is met on every split."
    yield f"`{NEW_GPU}` without a measurement has {each}; {mean:.3f} in the mean. The aim is {AIM}. {held}"
    for split in comparison.splits:
        for arm, than, _ in PAIRS[:2]:
            gains = paired_gains(comparison, split, arm, than) if than in comparison.agents else []
            behind = [f"{gain.budget} ({100 * gain.mean:+.2f}%)" for gain in gains if gain.high < 0]
            if behind:
                yield f"On *{split}* it is surely behind `{than}` after this many measurements: {', '.join(behind)}."


def _gains(comparison: Comparison, split: str) -> list[str]:
    """Return the table of paired gains of a split; empty without a pair of arms."""
    pairs = [pair for pair in PAIRS if {pair[0], pair[1]} <= set(comparison.agents)]
    if not pairs:
        return []
    lines = ["", "Paired gains in percent, with 95% intervals over problems:", ""]
    lines += table_lines(["difference", *comparison.budgets], 1, [])
    for arm, than, words in pairs:
        gains = paired_gains(comparison, split, arm, than)
        cells = [f"{100 * g.mean:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" for g in gains]
        lines.append(f"| {words}: `{arm}` over `{than}` | {' | '.join(cells)} |")
    return lines


#: The result file, beside the bench files.
RECIPE = "recipe.json"
#: The same at the published size, on the recording that no model chose.
FULL_RECIPE = "recipe_uncut.json"
#: Columns of the table that hold words.
_WORDS = 2


def recipe_block(path: Path) -> str:
    """Return the table in Markdown with its notes and source; one line with the command if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return (
            f"To be made: `outblas recipe --faulty 0.05 --out {path}`, then `python tools/published_pages.py --write`."
        )
    result = read_recipe(path)
    head, *rows = recipe_rows(result)
    made, recording = result["provenance"], result["recording"]
    source = f"Recording of {made['gpu']} (SHA-256 {recording['sha256'][:16]}); {made['date'][:10]}, commit "
    cpu = sum(curve["train_s"] for curve in result["curves"]) / 60
    source += f"{made['commit']}. The trainings took {cpu:.0f} minutes of one core: `{made['command']}`."
    return "\n".join(
        [*table_lines(head, _WORDS, rows), "", *(f"- {note}" for note in recipe_notes(result)), "", source]
    )
