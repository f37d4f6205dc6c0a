"""Cards and tables of a group of result rows: figures, top wins, regimes, losses, fall-backs, counters."""

from __future__ import annotations

from html import escape
from typing import Any

from outblas.kernels.config_text import config_from_name
from outblas.records.result_rows import Row
from outblas_lab.pool.averages import figures_of, published_us, torch_ratio
from outblas_lab.pool.counters import COUNTER_COLUMNS, counter_cells
from outblas_lab.publish.html.run_data import (
    Group,
    ReportedRun,
    kernel_words,
    regime_rows,
    shape,
    tflops,
    top_wins,
)
from outblas_lab.publish.html.shell import cards_html, table
from outblas_lab.publish.words import baseline_words, regime_words, short_config

#: Headings of the columns of the table with every problem, which the page's script fills.
_EVERY = ("Problem", "PDL", "Speed-up", "Interval", "OutBLAS µs", "Baseline µs", "% of floor", "Baseline", "Regime")


def group_cards(group: Group) -> str:
    """Return three large cards: geometric mean, FLOP-weighted mean, losses; then a table of the other figures. All is
    HTML.
    """
    figures = {pdl: figures_of(group.of_pdl(pdl)) for pdl in group.pdls}
    first, *others = group.pdls
    shown = (
        ("geomean", "Geometric mean of the speed-up", lambda f: f"{f['geomean']:.3f}×"),
        ("flop_weighted", "FLOP-weighted mean of the speed-up", lambda f: f"{f['flop_weighted']:.3f}×"),
        ("losses", "Losses (below 0.99×)", lambda f: f"{f['losses']} of {f['n']}"),
    )
    cards = []
    for name, label, text in shown:
        more = [
            f"<b data-figure='{name}' data-pdl='{_flag(pdl)}'>{text(figures[pdl])}</b> {group.launch_name(pdl)}"
            for pdl in others
        ]
        cards.append((name, text(figures[first]), label, "; ".join([group.launch_name(first), *more])))
    return cards_html(cards) + _other_figures(group)


def top_wins_table(group: Group) -> str:
    """Return the ten problems with the largest speed-ups and their kernels as an HTML table.

    If no speed-up is above 1 it is a paragraph.
    """
    rows = top_wins(group)
    if not rows:
        return "<p class='note'>Top wins: no row is above 1×.</p>"
    head = ("Problem", "PDL", "Speed-up", "Interval", "OutBLAS µs", "Baseline µs", "Baseline", "Regime", "Kernel")
    lines = [
        (
            shape(r),
            _flag(r["pdl"]),
            f"{r['published']:.3f}×",
            _interval(r),
            f"{published_us(r):.2f}",
            f"{r['baseline_us']:.2f}",
            baseline_words(r["baseline"]),
            regime_words(r["regime"]),
            kernel_words(r["config"]),
        )
        for r in rows
    ]
    caption = (
        f"The {len(rows)} problems with the largest speed-ups; a kernel is its family, tile (M×N) and changed knobs"
    )
    return table(caption, head, lines)


def regimes_table(group: Group) -> str:
    """Return the figures by regime as an HTML table: a row per regime and launch option, those of all regimes first."""
    head = ("Regime", "PDL", "Geometric mean", "Problems", "Worst", "Losses", "Fall-backs")
    head_floor = ("OutBLAS, % of floor", "Baseline, % of floor")
    lines = [
        (
            "all regimes" if r["regime"] == "all" else regime_words(r["regime"]),
            _flag(r["pdl"]),
            f"{r['geomean']:.3f}×",
            r["n"],
            f"{r['min']:.3f}×",
            r["losses"],
            r["fallbacks"],
            f"{r['ours_floor']:.1f}",
            f"{r['baseline_floor']:.1f}",
        )
        for r in regime_rows(group)
    ]
    caption = "Speed-up by regime; % of floor is the median of floor / time, so 100 is the hardware model's limit"
    return table(caption, (*head, *head_floor), lines, searched=False)


def losses_table(group: Group) -> str:
    """Return an HTML table of every loss (published below 0.99), worst first; a paragraph if no row is one."""
    rows = group.losses
    if not rows:
        return f"<p class='note'>Losses: none of {len(group.rows)} rows is below 0.99×.</p>"
    times = ("OutBLAS µs", "Baseline µs", "OutBLAS TFLOP/s")
    head = ("Problem", "PDL", "Speed-up", "Interval", *times, "Baseline", "Regime", "Kernel")
    lines = [
        (
            shape(r),
            _flag(r["pdl"]),
            f"{r['published']:.3f}×",
            _interval(r),
            f"{published_us(r):.2f}",
            f"{r['baseline_us']:.2f}",
            f"{tflops(r, published_us(r)):.1f}",
            baseline_words(r["baseline"]),
            regime_words(r["regime"]),
            kernel_words(r["config"]),
        )
        for r in rows
    ]
    return table(f"Losses: {len(rows)} of {len(group.rows)} rows are below 0.99×, worst first", head, lines)


def fallbacks_table(group: Group) -> str:
    """Return an HTML table of every row that falls back, or a paragraph if no row does."""
    rows = group.fallbacks
    if not rows:
        return f"<p class='note'>Fall-backs: none of {len(group.rows)} rows.</p>"
    head = ("Problem", "PDL", "Baseline", "Baseline µs", "Baseline TFLOP/s", "% of floor", "Regime", "Why")
    lines = [_fallback_line(r) for r in rows]
    counted = "count as measured" if any(row["ran"] for row in rows) else "count as 1.000×"
    return table(f"Fall-backs: {len(rows)} of {len(group.rows)} rows run a rival and {counted}", head, lines)


def every_problem(group: Group, index: int) -> str:
    """Return a folded HTML table of all rows, which the page's script fills when a reader opens it.

    Args:
        group: rows of one table.
        index: number of the group on the page, from 0. The script finds the rows by it (attribute ``data-every``).
    """
    count = len(group.rows)
    found = table(f"All {count} rows", (*_EVERY, "Kernel"), (), searched=True, attributes=f" data-every='{index}'")
    return f"<details class='every'><summary>Show and search all {count} rows</summary>{found}</details>"


def counters_section(run: ReportedRun) -> str:
    """Return the counters of ``outblas profile`` as HTML, a row per candidate; an empty text if the run was not
    profiled.
    """
    if not run.counters:
        return ""
    lines = [
        (problem, *counter_cells(counters), short_config(config_from_name(name)))
        for (problem, name), counters in run.counters.items()
    ]
    caption = "By Nsight Compute, of one launch alone; a stall is the number of warps that wait per issued instruction"
    found = table(caption, ("Problem", *COUNTER_COLUMNS, "Kernel"), lines)
    return f"<section aria-labelledby='counters'><h2 id='counters'>Hardware counters</h2>{found}</section>"


def _other_figures(group: Group) -> str:
    columns = [_column(group.of_pdl(pdl)) for pdl in group.pdls]
    lines = [
        f"<tr><th scope='row'>{escape(label)}</th>"
        + "".join(
            f"<td data-figure='{name}' data-pdl='{_flag(pdl)}'>{column[name]}</td>"
            for pdl, column in zip(group.pdls, columns, strict=True)
        )
        + "</tr>"
        for name, label in (
            ("n", "problems"),
            ("fallbacks", "fall back to the baseline"),
            ("sure", "certain wins (interval above 1)"),
            ("min", "worst speed-up"),
            ("torch", "over torch.matmul (geometric mean)"),
        )
    ]
    head = "".join(f"<th scope='col'>{group.launch_name(pdl)}</th>" for pdl in group.pdls)
    return (
        "<table class='small'><caption class='quiet'>Other figures</caption><thead><tr>"
        f"<th scope='col' class='text'>Figure</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _column(rows: list[Row]) -> dict[str, Any]:
    figures, torch = figures_of(rows), torch_ratio(rows)
    sure = sum(1 for r in rows if not r["fallback"] and r["low"] is not None and r["low"] > 1)
    return {
        "n": figures["n"],
        "fallbacks": f"{figures['fallbacks']} of {figures['n']}",
        "sure": f"{sure} of {figures['n']}",
        "min": f"{figures['min']:.3f}×",
        "torch": "not timed" if torch is None else f"{torch:.3f}×",
    }


def _fallback_line(r: Row) -> tuple[Any, ...]:
    us = r["baseline_us"]
    return (
        shape(r),
        _flag(r["pdl"]),
        baseline_words(r["baseline"]),
        f"{us:.2f}",
        f"{tflops(r, us):.1f}",
        f"{100 * r['floor_us'] / us:.1f}",
        regime_words(r["regime"]),
        _why(r),
    )


def _why(row: Row) -> str:
    """Say why a row runs the baseline."""
    status = str(row["status"])
    return {"left_out": "no kernel chosen", "passed": "kernel not faster"}.get(status, status)


def _interval(row: Row) -> str:
    return "none" if row["low"] is None or row["high"] is None else f"{row['low']:.3f} to {row['high']:.3f}"


def _flag(pdl: bool) -> str:
    return "on" if pdl else "off"
