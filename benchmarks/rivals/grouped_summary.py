"""The closing table of grouped_products.py, from the rows of its result file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

#: A row counts as lost below these ratios: over torch, and over the fastest rival that is right.
LOST_TO_TORCH, LOST_TO_FASTEST = 0.98, 0.95
#: Groups of at least this many rows are bound by FLOP; problems of at most this many tokens, by bytes.
FULL_ROWS, FEW_TOKENS = 256, 64

Row = Mapping[str, Any]


def ratios(rows: Iterable[Row], key: str) -> list[float]:
    """Return a ratio of those rows that have it."""
    return [row[key] for row in rows if key in row]


def mean_text(values: Sequence[float]) -> str:
    """Return the geometric mean with three digits, or a dash if there is no value."""
    return f"{geometric_mean(values):.3f}" if values else "-"


def table_line(label: str, rows: Sequence[Row]) -> str:
    """Return a line of the table: means of both ratios, and the number of rows below each limit."""
    torch, fastest = ratios(rows, "over_torch"), ratios(rows, "speedup")
    below = sum(each < LOST_TO_TORCH for each in torch), sum(each < LOST_TO_FASTEST for each in fastest)
    return f"{label:>6} {len(rows):>5} {mean_text(torch):>11} {mean_text(fastest):>13} {below[0]:>7} {below[1]:>7}"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the summary.

    The table has geometric means by tokens and over all rows. Two lists follow. The first has the TFLOP/s of problems
    whose every group has :data:`FULL_ROWS` rows or more. The second has the share of HBM bandwidth of problems with
    :data:`FEW_TOKENS` tokens or fewer.

    Args:
        rows: rows of the result file. One without a time of ours counts in no mean.
    """
    yield f"tokens  rows  over torch  over fastest  <{LOST_TO_TORCH:.2f}  <{LOST_TO_FASTEST:.2f}"
    for tokens in sorted({row["tokens"] for row in rows}):
        yield table_line(str(tokens), [row for row in rows if row["tokens"] == tokens])
    yield table_line("all", rows)
    timed = [row for row in rows if "tflops" in row]
    yield f"TFLOP/s, groups of {FULL_ROWS} rows or more:"
    for row in timed:
        if row["least_rows"] >= FULL_ROWS:
            yield f"  {row['problem']}: {row['tflops']:.0f}"
    few = [row for row in timed if row["tokens"] <= FEW_TOKENS]
    yield f"share of HBM bandwidth, {FEW_TOKENS} tokens or fewer, mean {mean_text(ratios(few, 'of_floor'))}:"
    for row in few:
        yield f"  {row['problem']}: {row['of_floor']:.2f}"
