"""The measured cases where OutBLAS does not pay: cold caches, single requests, large matmuls, and the worst rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.core.gpu_records import packaged_records
from outblas.core.stats import LOSS_BELOW, losses
from outblas.records.library import Library
from outblas.records.result_rows import Row
from outblas.records.results import Result
from outblas_lab.pool.averages import FAR_BELOW, figures_of, launch_label, table_label
from outblas_lab.publish.words import baseline_words, regime_words
from pages.table_words import table_lines

WORST_ROWS = 10
#: FLOP from which a matmul counts as large.
LARGE_FLOP = 1e11


def weak_spots(folder: Path, results: Sequence[Result], of: str = "") -> str:
    """Return one GPU's part of *When not to use it*, in Markdown: modes, large matmuls and the ten worst rows.

    Args:
        folder: folder of a GPU's result files, e.g. ``results/h200``; it is named at the end.
        of: end of every heading, e.g. ``" on NVIDIA H200"``.
    """
    parts = [*(_mode(results, mode, of) for mode in _TITLES), _large(results, of), _worst(results, of)]
    gpus, drivers = (", ".join(sorted({str(r.provenance[f]) for r in results})) for f in ("gpu", "driver"))
    parts.append(f"All results: {gpus}, driver {drivers}, files in `{folder.as_posix()}`.")
    return "\n\n".join(part for part in parts if part)


def gpus_with_library() -> str:
    """Return the section on GPUs without a packaged library, in Markdown."""
    known = [name for name in packaged_records() if Library.packaged(name, missing_ok=True).rows]
    have = ", ".join(name.upper() for name in known) or "no GPU"
    return (
        f"## GPUs without a library\n\nLibraries are packaged for: {have}. "
        "On all other GPUs, PyTorch computes every matmul until [a tuning run](your-gpu.md)."
    )


_TITLES = {
    "offline_cold": ("## Cold caches", "L2 is evicted before every call."),
    "server": (
        "## Single requests",
        "A request is one call, timed from its Poisson arrival to the finished matmul. Host time is included.",
    ),
    "block": (
        "## Large matmuls under sustained load",
        "Each kernel runs alone until the SM clock has settled, so its power draw affects its speed.",
    ),
}


def _mode(results: Sequence[Result], mode: str, of: str) -> str:
    groups: dict[tuple[str, str], list[Row]] = {}
    for result in results:
        for row in result.rows:
            if row["mode"] == mode:
                groups.setdefault((table_label(result.suite, row), launch_label(row)), []).append(row)
    if not groups:
        return ""
    title, words = _TITLES[mode]
    head = ["table", "PDL", "problems", "geometric mean", "FLOP-weighted", "below 0.99", "below 0.98", "worst"]
    lines = table_lines(head, 2, [])
    for (table, launch), rows in groups.items():
        found = figures_of(rows)
        lines.append(
            f"| {table} | {launch} | {found['n']} | {found['geomean']:.3f}× | {found['flop_weighted']:.3f}× | "
            f"{found['losses']} | {losses((row['published'] for row in rows), FAR_BELOW)} | {found['min']:.3f}× |"
        )
    return f"{title}{of}\n\n{words} {_chosen_words(groups)}".rstrip() + "\n\n" + "\n".join(lines)


def _chosen_words(groups: Mapping[Any, Sequence[Row]]) -> str:
    """Return where a mode's kernels were chosen, in a sentence; empty for mode ``block``, which chooses its own."""
    rows = [row for group in groups.values() for row in group]
    second = sum(row.get("plain_speedup") is not None for row in rows)
    if second:
        tuned = f"{second} of {len(rows)} rows run a kernel tuned for this workload"
        return f"{tuned}; all others were tuned with back-to-back calls and warm caches."
    return "All kernels were tuned with back-to-back calls and warm caches." if rows[0]["mode"] != "block" else ""


def _large(results: Sequence[Result], of: str) -> str:
    lines = table_lines(["table", "problems", "geometric mean", "fallbacks", "largest gain"], 1, [])
    for result in results:
        kinds: dict[str, list[Row]] = {}
        for row in result.rows:
            if row["mode"] == "offline" and not row["pdl"] and 2.0 * row["m"] * row["n"] * row["k"] >= LARGE_FLOP:
                kinds.setdefault(table_label(result.suite, row), []).append(row)
        for table, rows in kinds.items():
            found = figures_of(rows)
            best = max(row["published"] for row in rows)
            lines.append(f"| {table} | {found['n']} | {found['geomean']:.3f}× | {found['fallbacks']} | {best:.3f}× |")
    if len(lines) == 2:
        return ""
    words = "Tensor-core throughput limits matmuls of 10¹¹ FLOP or more (about 3700 × 3700 × 3700). Without PDL:"
    return f"## Large matmuls{of}\n\n{words}\n\n" + "\n".join(lines)


def _worst(results: Sequence[Result], of: str) -> str:
    every = [(row["published"], result.suite, row) for result in results for row in result.rows]
    equal: dict[tuple[str, str, float, str], list[Row]] = {}  # rows of a line
    for published, suite, row in sorted(every, key=lambda one: (one[0], one[1], *(one[2][d] for d in "mnk"))):
        shape = f"{row['m']} × {row['n']} × {row['k']}"
        equal.setdefault((shape, table_label(suite, row), published, row["baseline"]), []).append(row)
    lines = [
        "| M × N × K | table | PDL | speedup | fastest rival | regime |",
        "| --- | --- | --- | ---: | --- | --- |",
    ]
    for (shape, table, published, rival), rows in list(equal.items())[:WORST_ROWS]:
        launches = " / ".join(dict.fromkeys(map(launch_label, rows)))
        lines.append(
            f"| {shape} | {table} | {launches} | {published:.3f}× | {baseline_words(rival)} | "
            f"{regime_words(rows[0]['regime'])} |"
        )
    total = sum(published < LOSS_BELOW for published, *_ in every)
    words = (
        f"Of {len(every):,} published rows, {total:,} are below {LOSS_BELOW}. These are the ten worst. A fallback that "
        "runs both with and without PDL has one line:"
    )
    return f"## The ten worst rows{of}\n\n{words}\n\n" + "\n".join(lines)
