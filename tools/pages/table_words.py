"""Words and lines of the pages' tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: In place of a table whose result file is missing.
NOT_PUBLISHED = "No figures are published yet."


def mean_in_words(geomean: float, starts: Sequence[float] | None, bootstrap: Sequence[float] | None = None) -> str:
    """Return a mean with what its brackets hold, e.g. ``1.126× (starts 1.125–1.127)`` or ``1.22× (95% 1.18–1.26)``.

    The mean is of each problem's median over the starts. So it may lie outside the range of the starts' own means.

    Args:
        starts: least and greatest mean of a start of the machine; None: there was one start.
        bootstrap: 95% interval over problems; None: the problems are no sample.
    """
    found = [("starts", starts), ("95%", bootstrap)]
    inner = ", ".join(f"{name} {ends[0]:.3f}–{ends[1]:.3f}" for name, ends in found if ends)
    return f"{geomean:.3f}× ({inner})" if inner else f"{geomean:.3f}×"


def table_lines(head: Sequence[object], words: int, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table. The columns after the first ``words`` hold figures."""
    rule = [*["---"] * words, *["---:"] * (len(head) - words)]
    return [f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows)]


def step_words(name: str) -> str:
    """Return a step of a model for a reader: ``decode_8`` gives ``decode, batch 8``.

    Args:
        name: kind and count. The count is sequences of a decode step, else tokens.
    """
    kind, count = name.rsplit("_", 1)
    return f"decode, batch {count}" if kind == "decode" else f"{kind}, {count} tokens"
