"""The block of the page on learning across GPUs, from the result files of `outblas compare --across` alone.

What learning on another GPU adds is shown as a paired gain, problem by problem, and never as a difference of means.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outblas.publish.tables.compare_block import quality_table
from outblas.search.compare.compare_result import Comparison, figures, noise_regret, paired_gains, read_comparison
from outblas.search.compare.splits import SOURCES, arm_parts

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
    """Return the result files of all judged GPUs, sorted by the GPU's folder; empty if nothing was compared.

    Args:
        results: folder of the GPUs' folders.
    """
    return sorted(results.glob(f"*/{ACROSS}"))


def across_block(files: list[Path]) -> str:
    """Return, in Markdown, the tables of each judged GPU and the paired gains.

    Args:
        files: result files of `outblas compare --across`, one or more.

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
    """Return the tables of one judged GPU."""
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
    lines += ["| difference | " + " | ".join(map(str, comparison.budgets)) + " |"]
    lines += ["| --- |" + " ---: |" * len(comparison.budgets)]
    for arm, than, words in pairs:
        gains = paired_gains(comparison, split, arm, than)
        cells = [f"{100 * g.mean:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" for g in gains]
        lines.append(f"| {words}: `{arm}` over `{than}` | {' | '.join(cells)} |")
    return lines
