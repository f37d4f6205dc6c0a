"""The report page of a bench result or a tune run: one HTML file that works offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, ToolchainMissing
from outblas.core.files import write_atomic
from outblas.core.plain_files import read_plain_file
from outblas.records.results import PROVENANCE_FIELDS, read_meta
from outblas_lab.compare.compare_result import KIND as COMPARE_KIND
from outblas_lab.compare.compare_result import read_comparison
from outblas_lab.llm.evolve_folder import is_evolution
from outblas_lab.pool.averages import figures_of
from outblas_lab.pool.counters import COUNTER_COLUMNS
from outblas_lab.publish.html import tune_tables
from outblas_lab.publish.html.charts import Chart
from outblas_lab.publish.html.compare_page import render_comparison
from outblas_lab.publish.html.evolve_data import load_evolution
from outblas_lab.publish.html.evolve_page import render_evolution
from outblas_lab.publish.html.heat import heat_maps
from outblas_lab.publish.html.page import is_page, page_text
from outblas_lab.publish.html.run_data import EMBEDDED, Group, ReportedRun, embedded_rows, find_gpu, load_run, top_wins
from outblas_lab.publish.html.tune_charts import group_charts
from outblas_lab.publish.words import date_words


def write_report(run_path: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> Path:
    """Write the report of a bench result file, a tune or evolve run directory, or a comparison of agents.

    Raises:
        RecordError: the run cannot be read, or the page cannot be written.
        ToolchainMissing: Jinja2 or Matplotlib is not installed.
    """
    path = Path(run_path)
    if path.is_dir() and is_evolution(path):
        text = render_evolution(load_evolution(path))
    elif path.is_file() and read_meta(path).get("kind") == COMPARE_KIND:
        text = render_comparison(read_comparison(path))
    else:
        text = render(load_run(path))
    return write_atomic(Path(out_html), text.encode(errors="replace"))


def check_page(path: Path) -> None:
    """Raise unless a file is a page of OutBLAS; return None if it is.

    Raises:
        RecordError: it is another file.
        OSError: it cannot be read.
    """
    if not is_page(read_plain_file(path)):
        raise RecordError(f"{path} is not a report", "a page from `outblas report`", "pass another file")


def render(run: ReportedRun) -> str:
    """Return the whole page as text; the same run gives the same text."""
    gpu = str(run.measured.get("gpu", "unknown"))
    charts = [group_charts(group, gpu) for group in run.groups]
    data = {
        "suite": run.result.suite,
        "provenance": run.result.provenance,
        "run": run.run,
        "groups": [_payload(group, drawn) for group, drawn in zip(run.groups, charts, strict=True)],
    }
    return page_text(
        "tune.html.j2",
        data,
        run=run,
        groups=run.groups,
        charts=charts,
        gpu_name=gpu,
        gpu=find_gpu(gpu),
        date=date_words(run.measured.get("date", "unknown")),
        facts=_facts(run),
        use=_use(run),
        verdicts=[tune_tables.verdict(group, gpu) for group in run.groups],
        heat_maps=heat_maps,
        top_wins=top_wins,
        **{
            name: getattr(tune_tables, name)
            for name in ("cells", "counters", "flag", "intervals", "regimes", "summary")
        },
        counter_columns=COUNTER_COLUMNS,
    )


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


def _use(run: ReportedRun) -> str | None:
    """Return the line of Python that uses the library of this run, or the packaged one; None if the run has none."""
    library = run.result.path.parent / "library.json"
    if run.tuned and not library.is_file():
        return None
    call = f'use_library("{library.as_posix()}")' if run.tuned else "enable()"
    return f"import outblas; outblas.{call}"


def _facts(run: ReportedRun) -> dict[str, Any]:
    facts: dict[str, Any] = {"suite": run.result.suite, "result file": run.result.path.name}
    facts |= {f: run.result.provenance.get(f) for f in PROVENANCE_FIELDS}
    facts |= _run_facts(run.run, facts)
    if run.replayed:  # all but the command are the recording's
        facts = {f"recorded: {f}" if f in PROVENANCE_FIELDS[:-1] else f: value for f, value in facts.items()}
    for column, name, unit in (("sm_clock_mhz", "SM clock", "MHz"), ("temperature_c", "temperature", "°C")):
        values = [row[column] for row in run.result.rows if row[column] is not None]
        if values:
            facts[name] = f"{min(values):g} to {max(values):g} {unit}"
    return facts


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


def page_of_run(run: Path, page: Path) -> str:
    """Write the report of a run that has ended; return its path, or one line on what is missing for it.

    A package that only reports need must not fail a run whose results are there.
    """
    try:
        return str(write_report(run, page))
    except ToolchainMissing as missing:
        return f"not written: {missing}, then run outblas report {run}"
