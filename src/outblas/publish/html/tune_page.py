"""The report page of a bench result or a tune run: one HTML file that works offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from outblas.core.config import LAUNCHES
from outblas.core.errors import RecordError
from outblas.core.files import write_atomic
from outblas.core.plain_files import read_plain_file
from outblas.llm.evolve_folder import is_evolution
from outblas.publish.html import definitions as terms
from outblas.publish.html.charts import Chart, chart_html
from outblas.publish.html.compare_page import render_comparison
from outblas.publish.html.evolve_data import load_evolution
from outblas.publish.html.evolve_page import render_evolution
from outblas.publish.html.figures import find_gpu, group_charts
from outblas.publish.html.heat import heat_html
from outblas.publish.html.run_data import EMBEDDED, Group, ReportedRun, embedded_rows, load_run
from outblas.publish.html.shell import copy_html, html_page, is_page, provenance_section, table
from outblas.publish.html.tune_tables import (
    counters_section,
    every_problem,
    fallbacks_table,
    group_cards,
    losses_table,
    regimes_table,
    top_wins_table,
)
from outblas.publish.words import date_words, short_config
from outblas.records.averages import figures_of
from outblas.records.library_row import LibraryChoice, LibraryInterval
from outblas.records.results import PROVENANCE_FIELDS, read_meta
from outblas.search.compare.compare_result import KIND as COMPARE_KIND
from outblas.search.compare.compare_result import read_comparison

_SELECTION = (
    "Selection bias: the search chose the winners by these very times, so they look slightly too good. "
    "outblas bench times them afresh."
)


def write_report(run_path: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Write the report of a bench result file, a tune or evolve run directory, or a comparison of agents.

    Args:
        run_path: the file or the directory.
        out_html: path of the page.

    Returns:
        Path of the page.

    Raises:
        RecordError: the run cannot be read, or the page cannot be written.
    """
    path = Path(run_path)
    if path.is_dir() and is_evolution(path):
        return write_atomic(Path(out_html), render_evolution(load_evolution(path)).encode(errors="replace"))
    kind = read_meta(path).get("kind") if path.is_file() else None
    if kind == COMPARE_KIND:
        return write_atomic(Path(out_html), render_comparison(read_comparison(path)).encode(errors="replace"))
    return write_atomic(Path(out_html), render(load_run(path)).encode(errors="replace"))


def check_page(path: Path) -> None:
    """Raise unless a file is a page of OutBLAS; return None if it is.

    Raises:
        RecordError: it is another file.
        OSError: it cannot be read.
    """
    if not is_page(read_plain_file(path)):
        raise RecordError(f"{path} is no report", "a page of `outblas report`", "pass another file")


def render(run: ReportedRun) -> str:
    """Return the whole page as text; the same run gives the same text."""
    groups = run.groups
    gpu = str(run.measured.get("gpu", "unknown"))
    charts = [group_charts(group, gpu) for group in groups]
    data = {
        "suite": run.result.suite,
        "provenance": run.result.provenance,
        "run": run.run,
        "groups": [_payload(group, drawn) for group, drawn in zip(groups, charts, strict=True)],
    }
    body = "\n".join(
        [
            terms.definitions_html(_definitions(groups, gpu)),
            *(_section(group, drawn, i) for i, (group, drawn) in enumerate(zip(groups, charts, strict=True))),
            intervals_section(run),
            _use(run),
            counters_section(run),
            _provenance(run),
        ]
    )
    return html_page(f"OutBLAS report: {run.result.suite} on {gpu}", _origin(run), body, data)


def _payload(group: Group, charts: dict[str, Chart]) -> dict[str, Any]:
    rows, kernels = embedded_rows(group)
    return {
        "title": group.title,
        "launches": [group.launch_name(False), group.launch_name(True)],
        "figures": {name: chart.payload() for name, chart in charts.items()},
        "summary": [{"pdl": pdl, **figures_of(group.of_pdl(pdl))} for pdl in group.pdls],
        "columns": EMBEDDED,
        "rows": rows,
        "kernels": kernels,
    }


def _section(group: Group, charts: dict[str, Chart], index: int) -> str:
    def drawn(name: str, title: str, note: str) -> str:
        return chart_html(charts[name], index, name, title, note) if name in charts else ""

    roofline = drawn(
        "roofline",
        "Roofline",
        "A dot is a problem. Tick the boxes to compare OutBLAS with the best baseline and with the floor.",
    )
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>{escape(group.title)}</h2>",
        group_cards(group),
        "<h3>Top wins</h3>",
        top_wins_table(group),
        "<h3>Distribution of the speed-up</h3><div class='pair'>",
        drawn("curve", "Sorted speed-ups", "Every problem, from worst to best. The line at 1 is the baseline."),
        drawn(
            "histogram", "How many problems gain how much", "Problems per bin of the speed-up, on a logarithmic axis."
        ),
        "</div><h3>Speed-up over M and N</h3>",
        heat_html(group, index),
        "<h3>Speed-up by regime</h3>",
        regimes_table(group),
        "<div class='pair'>" if roofline else "",
        drawn("decades", "Speed-up by size", "Geometric mean of each decade of floating-point operations."),
        roofline,
        "</div>" if roofline else "",
        "<h3>Losses and fall-backs</h3>",
        losses_table(group),
        fallbacks_table(group),
        "<h3>Every problem</h3>",
        every_problem(group, index),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _origin(run: ReportedRun) -> str:
    """State the origin of the figures; a replay is named before anything else."""
    m = run.measured
    gpu, date = escape(str(m.get("gpu", "unknown"))), escape(date_words(m.get("date", "unknown")))
    bias = f" {_SELECTION}" if run.tuned else ""
    if run.replayed:
        return (
            f"<p class='origin replay'>This run <strong>replayed recorded measurements of {gpu}, {date}</strong>. "
            f"Nothing was timed on the machine that made this report.{bias}</p>"
        )
    return f"<p class='origin'>Measured on {gpu}, {date}.{bias}</p>"


def _definitions(groups: Sequence[Group], gpu: str) -> list[terms.Definition]:
    points = [terms.SPEEDUP, terms.FLOP_WEIGHTED, terms.LOSS, terms.FALLBACK, terms.PDL, terms.LAYOUT]
    points += [terms.floor_definition(find_gpu(gpu)), terms.REGIME, terms.INTERVAL]
    if any(g.early for g in groups):
        points.append(terms.CONSTANT_WEIGHTS)
    if any(g.mode == "server" for g in groups):
        points.append(terms.SERVER)
    return points


def _use(run: ReportedRun) -> str:
    """Return the line of Python that uses the library of this run, or the packaged one."""
    library = run.result.path.parent / "library.json"
    if run.run and library.is_file():
        words = "This line makes outblas.matmul use the kernels of this run, on a GPU of the same kind:"
        line = f'import outblas; outblas.use_library("{library.as_posix()}")'
    elif run.run:
        return ""
    else:
        words = "The packaged library is used from the start. This line makes torch.matmul use it, too:"
        line = "import outblas; outblas.enable()"
    head = "<section aria-labelledby='use'><h2 id='use'>Use this library</h2>"
    return f"{head}{copy_html(words, line)}</section>"


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
    """Return the facts of run.json that are not `known`; of a recording its name and its differences."""
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


_LAUNCH_HEADS = ("Without PDL", "With PDL", "Constant weights")


def intervals_section(run: ReportedRun) -> str:
    """Return the run's intervals as HTML, a row per interval; an empty text if it has none."""
    if not run.intervals:
        return ""
    lines = [
        (one.weight.key, f"{one.first}..{one.last}", *_choices(one), ", ".join(map(str, one.measured)))
        for one in run.intervals
    ]
    caption = "One kernel per launch option serves each M; speed-ups are the lowest of the measured M"
    found = table(caption, ("Weight", "M", *_LAUNCH_HEADS, "Proved at M"), lines)
    return f"<section aria-labelledby='intervals'><h2 id='intervals'>Intervals of M</h2>{found}</section>"


def _choices(one: LibraryInterval) -> list[str]:
    """Return for each launch option the kernel with its lowest speed-up, or what runs in its place."""
    baseline = "cuBLASLt " + one.row.fallback if one.row.fallback else "torch.matmul"
    return [baseline if c is None else _kernel(c) for c in map(one.row.choice, LAUNCHES)]


def _kernel(choice: LibraryChoice) -> str:
    return f"{short_config(choice.config)}, {choice.speedup:.3f}×"
