"""Cells of the tables of a tune report: figures, result rows, regimes, intervals, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from outblas.core.config import LAUNCHES
from outblas.core.stats import LOSS_BELOW, geomean, losses
from outblas.kernels.config_text import config_from_name
from outblas.records.library_row import LibraryChoice
from outblas.records.result_rows import Row
from outblas_lab.pool.averages import figures_of, published_us, regime_order, torch_ratio
from outblas_lab.pool.counters import counter_cells
from outblas_lab.publish.html.run_data import Group, ReportedRun, kernel_words, shape, tflops
from outblas_lab.publish.words import ALL_RIVALS, baseline_words, regime_words, short_config

#: A geometric mean this near to 1 is a draw: starts of the machine differ by as much.
DRAW = 0.005

#: What a row of results has under each heading.
_CELLS: dict[str, Callable[[Row], Any]] = {
    "Problem": shape,
    "PDL": lambda row: flag(row["pdl"]),
    "Speed-up": lambda row: f"{row['published']:.3f}×",
    "Interval": lambda row: "none" if None in (row["low"], row["high"]) else f"{row['low']:.3f} to {row['high']:.3f}",
    "OutBLAS µs": lambda row: f"{published_us(row):.2f}",
    "Baseline µs": lambda row: f"{row['baseline_us']:.2f}",
    "OutBLAS TFLOP/s": lambda row: f"{tflops(row, published_us(row)):.1f}",
    "Baseline TFLOP/s": lambda row: f"{tflops(row, row['baseline_us']):.1f}",
    "% of floor": lambda row: f"{100 * row['floor_us'] / row['baseline_us']:.1f}",
    "Baseline": lambda row: baseline_words(row["baseline"]),
    "Regime": lambda row: regime_words(row["regime"]),
    "Kernel": lambda row: kernel_words(row["config"]),
    "Why": lambda row: {"left_out": "no kernel chosen", "passed": "kernel not faster"}.get(
        row["status"], row["status"]
    ),
}


def flag(pdl: bool) -> str:
    return "on" if pdl else "off"


def cells(rows: Sequence[Row], head: Sequence[str]) -> list[list[Any]]:
    """Return the cells of result rows under the headings of a table."""
    return [[_CELLS[heading](row) for heading in head] for row in rows]


def verdict(group: Group, gpu: str) -> list[str]:
    """Return for each launch option how fast its problems are in the mean, and how many are faster, level and slower.

    Level is within 1%. The mean is of all problems, fall-backs too, e.g. ``"40 problems on NVIDIA H200, without PDL:
    17.1% faster than the fastest of torch, cuBLAS and autotuned cuBLASLt on average (geometric mean); 30 faster, 10
    level, 0 slower."``
    """
    sentences = list[str]()
    for pdl in group.pdls:
        speedups = [r["published"] for r in group.of_pdl(pdl)]
        mean = geomean(speedups)
        change = f"{100 * abs(mean - 1):.1f}% {'faster' if mean > 1 else 'slower'}"
        words, link = (f"level ({mean:.3f}×)", "with") if abs(mean - 1) < DRAW else (change, "than")
        slower, faster = losses(speedups), sum(s > 1 / LOSS_BELOW for s in speedups)
        counts = f"{faster} faster, {len(speedups) - faster - slower} level, {slower} slower"
        problems = f"{len(speedups)} problem{'s' * (len(speedups) != 1)} on {gpu}, "
        start, end = ("The same ", "") if sentences else (problems, f" {link} {ALL_RIVALS} on average (geometric mean)")
        sentences.append(f"{start}{group.launch_name(pdl)}: {words}{end}; {counts}.")
    return sentences


def summary(group: Group) -> dict[bool, dict[str, Any]]:
    """Return launch option -> name of a figure -> its text, e.g. ``{"geomean": "1.126×", "sure": "736 of 1000"}``."""
    texts = {}
    for pdl in group.pdls:
        rows = group.of_pdl(pdl)
        figures, torch = figures_of(rows), torch_ratio(rows)
        sure = sum(1 for r in rows if not r["fallback"] and r["low"] is not None and r["low"] > 1)
        counts = {"losses": figures["losses"], "fallbacks": figures["fallbacks"], "sure": sure}
        texts[pdl] = {
            **{name: f"{figures[name]:.3f}×" for name in ("geomean", "flop_weighted", "min")},
            **{name: f"{count} of {figures['n']}" for name, count in counts.items()},
            "n": figures["n"],
            "torch": "not timed" if torch is None else f"{torch:.3f}×",
        }
    return texts


def regimes(group: Group) -> list[tuple[Any, ...]]:
    """Return a line per regime and launch option, those of all regimes first.

    The last two columns are medians of floor / time, in percent. The time of a fall-back row is the baseline's,
    because the library runs it.
    """
    lines: list[tuple[Any, ...]] = []
    for name in ("all", *sorted({r["regime"] for r in group.rows}, key=regime_order)):
        for pdl in group.pdls:
            rows = [r for r in group.of_pdl(pdl) if name in ("all", r["regime"])]
            if not rows:
                continue
            f = figures_of(rows)
            times = ([published_us(r) for r in rows], [r["baseline_us"] for r in rows])
            lines.append((
                "all regimes" if name == "all" else regime_words(name), flag(pdl), f"{f['geomean']:.3f}×", f["n"],
                f"{f['min']:.3f}×", f["losses"], f["fallbacks"],
                *(f"{100 * median(r['floor_us'] / t for r, t in zip(rows, us, strict=True)):.1f}" for us in times),
            ))  # fmt: skip
    return lines


def intervals(run: ReportedRun) -> list[tuple[str, ...]]:
    """Return a line per interval: for each launch option the kernel with its lowest speed-up, or what runs instead."""

    def words(choice: LibraryChoice | None, fallback: str | None) -> str:
        if choice is not None:
            return f"{short_config(choice.config)}, {choice.speedup:.3f}×"
        return f"cuBLASLt {fallback}" if fallback else "torch.matmul"

    return [
        (
            *(one.weight.key, f"{one.first}..{one.last}"),
            *(words(one.row.choice(launch), one.row.fallback) for launch in LAUNCHES),
            ", ".join(map(str, one.measured)),
        )
        for one in run.intervals
    ]


def counters(run: ReportedRun) -> list[tuple[str, ...]]:
    """Return a line per candidate that `outblas profile` profiled."""
    return [
        (problem, *counter_cells(found), short_config(config_from_name(name)))
        for (problem, name), found in run.counters.items()
    ]
