"""The report page: one HTML file with everything in it, Plotly included; it asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from outblas.core.files import write_atomic
from outblas.kernels.config_text import config_from_name
from outblas.llm.evolve_folder import is_evolution
from outblas.publish.html.compare_page import render_comparison
from outblas.publish.html.evolve_data import load_evolution
from outblas.publish.html.evolve_page import render_evolution
from outblas.publish.html.figures import group_figures
from outblas.publish.html.run_data import EMBEDDED, Group, ReportedRun, load_run, regime_rows, shape, tflops
from outblas.publish.html.shell import chart, date_text, how_to_read, html_page, provenance_section, table
from outblas.publish.words import PDL_NAMES, short_config
from outblas.records.averages import Row, figures_of, published_us, torch_ratio
from outblas.records.results import PROVENANCE_FIELDS, read_meta
from outblas.runtime.counters import COUNTER_COLUMNS, counter_cells
from outblas.search.compare.compare_result import KIND, read_comparison

_SELECTION = (
    "Selection bias: winners are shown with the times that they were chosen by, which flatters them a little; "
    "outblas bench times them afresh."
)


def write_report(run_path: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Write the report of a bench result file, a tune or evolve run directory or a comparison of agents.

    Raises:
        RecordError: when the run cannot be read or the page cannot be written.
        ToolchainMissing: without plotly.
    """
    path = Path(run_path)
    if path.is_dir() and is_evolution(path):
        return write_atomic(Path(out_html), render_evolution(load_evolution(path)).encode(errors="replace"))
    if path.is_file() and read_meta(path).get("kind") == KIND:
        return write_atomic(Path(out_html), render_comparison(read_comparison(path)).encode(errors="replace"))
    return write_atomic(Path(out_html), render(load_run(path)).encode(errors="replace"))


def render(run: ReportedRun) -> str:
    """The whole page as text; the same for the same run."""
    groups = run.groups
    gpu = str(run.measured.get("gpu", "unknown"))
    data = {
        "suite": run.result.suite,
        "provenance": run.result.provenance,
        "run": run.run,
        "groups": [_payload(group, gpu) for group in groups],
    }
    title = f"OutBLAS report: {run.result.suite} on {gpu}"
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1>{_origin(run)}</header>",
            "<main>",
            *(_section(group, index) for index, group in enumerate(groups)),
            _counters(run),
            _method(groups),
            _provenance(run),
            "</main>",
            "<noscript><p class='note'>The charts need JavaScript; the tables do not.</p></noscript>",
        ]
    )
    return html_page(title, body, data)


def _payload(group: Group, gpu: str) -> dict[str, Any]:
    return {
        "title": group.title,
        "figures": group_figures(group, gpu),
        "summary": [{"pdl": pdl, **figures_of(group.of_pdl(pdl))} for pdl in group.pdls],
        "columns": EMBEDDED,
        "rows": [[row[c] for c in EMBEDDED] for row in group.rows],
    }


def _section(group: Group, index: int) -> str:
    charts = [
        ("curve", "Sorted speed-ups", "Every problem's speed-up, worst to best. The line at 1 is the baseline."),
        ("histogram", "How many problems gain how much", "Problems per bin of the speed-up, logarithmic."),
    ]
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>{escape(group.title)}</h2>",
        _cards(group),
        "<h3>Speed-up distribution</h3><div class='pair'>",
        *(chart(index, *words) for words in charts),
        "</div><h3>Heat maps over M and N</h3>",
        _heat(group, index),
    ]
    if group.mode != "server":
        note = "What the library runs, the best baseline, and the fastest that the hardware model allows."
        parts += ["<h3>Roofline</h3>", chart(index, "roofline", "Roofline", note)]
    note = "Geometric mean of the speed-up of every decade of FLOP (2MNK); hover for the number of problems."
    parts += ["<h3>By size</h3>", chart(index, "decades", "Speed-up by FLOP decade", note)]
    parts += ["<h3>By regime</h3>", _regimes(group)]
    parts += ["<h3>Losses and fall-backs</h3>", _losses(group), _fallbacks(group)]
    return "\n".join([*parts, "</section>"])


def _cards(group: Group) -> str:
    cards = []
    for pdl in group.pdls:
        rows = group.of_pdl(pdl)
        f, flag = figures_of(rows), "on" if pdl else "off"
        torch = torch_ratio(rows)
        sure = sum(1 for r in rows if not r["fallback"] and r["low"] is not None and r["low"] > 1)
        for name, value, label in (
            ("geomean", f"{f['geomean']:.3f}×", "geometric mean"),
            ("flop_weighted", f"{f['flop_weighted']:.3f}×", "FLOP-weighted mean"),
            ("losses", f"{f['losses']} of {f['n']}", "losses (below 0.99×)"),
            ("fallbacks", f"{f['fallbacks']} of {f['n']}", "fall back to the baseline"),
            ("min", f"{f['min']:.3f}×", "worst"),
            ("sure", f"{sure} of {f['n']}", "certain wins (interval above 1)"),
            ("torch", "none" if torch is None else f"{torch:.3f}×", "over torch.matmul (geometric mean)"),
        ):
            cards.append(
                f"<li class='card {name}' data-figure='{name}' data-pdl='{flag}'>"
                f"<strong>{escape(value)}</strong><span>{escape(label)} {PDL_NAMES[pdl]}</span></li>"
            )
    return f"<ul class='cards'>{''.join(cards)}</ul>"


def _heat(group: Group, index: int) -> str:
    ks = sorted({r["k"] for r in group.rows})
    slider = (
        f"<label>K = <output id='heat-k-{index}'>{ks[0]}</output> "
        f"<input type='range' min='0' max='{len(ks) - 1}' step='1' value='0' data-k='{index}' aria-label='K'></label>"
    )
    toggle = f"<label><input type='checkbox' data-pdl-toggle='{index}'> with PDL</label>"
    controls = (slider if len(ks) > 1 else f"<span>K = {ks[0]}</span>") + (
        toggle if len(group.pdls) > 1 else f"<span>{PDL_NAMES[group.pdls[0]]}</span>"
    )
    note = (
        "Blue is faster than the best baseline, orange slower; the scale is logarithmic and centred at 1. "
        "1.00 without colour: the library falls back to the baseline, or is level with it."
    )
    return f"<div class='controls'>{controls}</div>" + chart(index, "heat", "Speed-up over M and N for one K", note)


def _regimes(group: Group) -> str:
    head = ("Regime", "PDL", "Geomean", "Problems", "Worst", "Losses", "Fall-backs")
    head_floor = ("Ours, % of floor", "Baseline, % of floor")
    lines = [
        (
            r["regime"],
            "on" if r["pdl"] else "off",
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
    caption = "Published speed-up by regime; % of floor is the median of floor / time"
    return table(caption, (*head, *head_floor), lines)


def _losses(group: Group) -> str:
    rows = group.losses
    if not rows:
        return f"<p class='note'>Losses: none of {len(group.rows)} rows is below 0.99×.</p>"
    times = ("Ours µs", "Baseline µs", "Ours TFLOP/s")
    head = ("Problem", "PDL", "Speed-up", "Interval", *times, "Baseline", "Regime", "Config")
    lines = [
        (
            shape(r),
            "on" if r["pdl"] else "off",
            f"{r['published']:.3f}×",
            "none" if r["low"] is None or r["high"] is None else f"{r['low']:.3f} to {r['high']:.3f}",
            f"{published_us(r):.2f}",
            f"{r['baseline_us']:.2f}",
            f"{tflops(r, published_us(r)):.1f}",
            r["baseline"],
            r["regime"],
            r["config"],
        )
        for r in rows
    ]
    caption = f"Losses: {len(rows)} of {len(group.rows)} rows are below 0.99×, worst first"
    return table(caption, head, lines, limited=True)


def _fallbacks(group: Group) -> str:
    rows = group.fallbacks
    if not rows:
        return f"<p class='note'>Fall-backs: none of {len(group.rows)} rows.</p>"
    head = ("Problem", "PDL", "Baseline", "Baseline µs", "Baseline TFLOP/s", "% of floor", "Regime", "Status of ours")
    lines = [_fallback_line(r) for r in rows]
    caption = f"Fall-backs: {len(rows)} of {len(group.rows)} rows run the baseline and count as 1.000×"
    return table(caption, head, lines, limited=True)


def _fallback_line(r: Row) -> tuple[Any, ...]:
    us = r["baseline_us"]
    on = "on" if r["pdl"] else "off"
    part = f"{100 * r['floor_us'] / us:.1f}"
    return (shape(r), on, r["baseline"], f"{us:.2f}", f"{tflops(r, us):.1f}", part, r["regime"], r["status"])


def _counters(run: ReportedRun) -> str:
    """What ``outblas profile`` found, a line per candidate; nothing where it did not run."""
    if not run.counters:
        return ""
    lines = [
        (problem, *counter_cells(counters), short_config(config_from_name(name)))
        for (problem, name), counters in run.counters.items()
    ]
    caption = "By Nsight Compute, of one launch alone; a stall is the warps that wait per instruction issued"
    found = table(caption, ("Problem", *COUNTER_COLUMNS, "Config"), lines, limited=True)
    return f"<section aria-labelledby='counters'><h2 id='counters'>Hardware counters</h2>{found}</section>"


def _origin(run: ReportedRun) -> str:
    """Where the figures come from, in words; a replay says so before anything else."""
    m = run.measured
    gpu, date = escape(str(m.get("gpu", "unknown"))), escape(date_text(m.get("date", "unknown")))
    bias = f" {_SELECTION}" if run.tuned else ""
    if run.replayed:
        return (
            f"<p class='origin replay'>This run <strong>replayed recorded measurements of {gpu}, {date}</strong>. "
            f"Nothing was timed on the machine that made this report.{bias}</p>"
        )
    return f"<p class='origin'>Measured on {gpu}, {date}.{bias}</p>"


def _method(groups: Sequence[Group]) -> str:
    points = [
        "Speed-up: median over interleaved rounds of time of the fastest baseline / our time, for the same problem.",
        "Where the library falls back to the baseline the row counts as exactly 1. A loss is a speed-up below 0.99.",
        "FLOP-weighted mean: exp(Σ FLOP·ln s / Σ FLOP), the gain of a random FLOP rather than of a random problem.",
        "Interval: 95% bootstrap of the median paired ratio. PDL: programmatic dependent launch.",
    ]
    if any(g.mode == "server" for g in groups):
        points.append("Server mode: latency of one call per request, from call to completion; not GPU time.")
    return how_to_read(points)


def _provenance(run: ReportedRun) -> str:
    facts: dict[str, Any] = {"suite": run.result.suite, "result file": run.result.path.name}
    facts |= {f: run.result.provenance.get(f) for f in PROVENANCE_FIELDS}
    facts |= _run_facts(run.run, facts)
    clock = [r["sm_clock_mhz"] for r in run.result.rows if r["sm_clock_mhz"] is not None]
    heat = [r["temperature_c"] for r in run.result.rows if r["temperature_c"] is not None]
    if clock:
        facts["SM clock"] = f"{min(clock):g} to {max(clock):g} MHz"
    if heat:
        facts["temperature"] = f"{min(heat):g} to {max(heat):g} °C"
    return provenance_section(facts)


def _run_facts(run: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """What run.json says beyond the ``known`` facts; of a recording its name, and where its provenance differs."""
    facts: dict[str, Any] = {}
    for key, value in sorted(run.items()):
        nested = value.items() if isinstance(value, dict) else ()
        inner = dict(nested).pop("provenance", {})
        if key == "provenance":
            facts |= {f"run: {k}": v for k, v in nested if known.get(k) != v}
        elif isinstance(inner, dict) and inner:
            facts |= {f"{key}: {k}": v for k, v in nested if k != "provenance"}
            facts |= {f"{key}: {k}": v for k, v in inner.items() if known.get(k) != v}
        elif key not in ("format", "kind") and known.get(key) != value:
            facts[f"run: {key}"] = value
    return facts
