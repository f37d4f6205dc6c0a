"""The report page of an evolution: outcomes, spending, and the progress, lineage and best kernel of every problem."""

from __future__ import annotations

import math
from typing import Any

from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.records.results import PROVENANCE_FIELDS
from outblas_lab.jail.plausibility import PLAUSIBLE_SHARE
from outblas_lab.llm.feedback import OUTCOME_KINDS
from outblas_lab.publish.html.charts import Chart
from outblas_lab.publish.html.evolve_charts import difference, lineage_chart, progress_chart
from outblas_lab.publish.html.evolve_data import MAX_ANCESTORS, EvolveRun, GroupTotals
from outblas_lab.publish.html.page import page_text
from outblas_lab.publish.html.run_data import gpu_or_reference


def render_evolution(run: EvolveRun) -> str:
    """Return the whole page as text; the same run gives the same text."""
    problems = [_problem(run, key) for key in run.problems]
    figures = [{name: chart.payload() for name, chart in problem["charts"].items()} for problem in problems]
    groups = [{"title": key, "figures": drawn} for key, drawn in zip(run.problems, figures, strict=True)]
    scores = [entry.score for key in run.problems if (entry := run.archive.best(key)) is not None]
    return page_text(
        "evolve.html.j2",
        {"provenance": run.about.get("provenance"), "groups": groups},
        run=run,
        gpu=gpu_or_reference(str(run.about.get("gpu"))),
        facts=_facts(run),
        problems=problems,
        mean=math.exp(sum(scores) / len(scores)) if scores else None,
        proven=dict(run.kinds()).get("proven", 0),
        kinds=[(kind, count, OUTCOME_KINDS[kind]) for kind, count in run.kinds()],
        by_answer=[_side(side) for side in run.by_answer()],
        by_model=[_side(side) for side in run.by_model()],
        plausible_share=PLAUSIBLE_SHARE,
        max_ancestors=MAX_ANCESTORS,
    )


def charts_of(run: EvolveRun, key: str) -> dict[str, Chart]:
    """Return the charts of a problem: ``curve``, and ``tree`` if a kernel was proven."""
    points = [
        (count, o.ratio, o.answer)
        for count, (_, o) in enumerate(run.of(key), 1)
        if o.kind == "proven" and o.ratio is not None
    ]
    # The floor is drawn relative to the fastest baseline, as last measured.
    times = [e.baselines_us for (problem, _), e in run.evaluations.items() if problem == key and e.baselines_us]
    gpu = gpu_or_reference(str(run.about.get("gpu")))
    floor = min(times[-1].values()) / floor_us(Problem.from_key(key), gpu) if times else None
    charts, best = {"curve": progress_chart(points, floor)}, run.archive.best(key)
    if best is not None:
        charts["tree"] = lineage_chart(run.lineage(key, best.name))
    return charts


def _side(side: GroupTotals) -> tuple[Any, ...]:
    spent = side.spent
    per = f"{100e3 * side.gain / spent.tokens:.3f}" if spent.tokens else "none"
    answers = (side.name, sum(side.kinds.values()), side.kinds["proven"], side.new_bests, f"{side.gain:.3f}")
    return (*answers, spent.requests, spent.tokens, f"{spent.usd:.4f}", per)


def _problem(run: EvolveRun, key: str) -> dict[str, Any]:
    best = run.archive.best(key)
    name = best.name if best else ""
    text = run.text(key, name)
    parents = [parent for node in run.lineage(key, name) if node.name == name for parent in node.parents]
    entries = sorted(run.archive.of(key), key=lambda e: -e.score)
    return {
        "key": key,
        "floor_us": floor_us(Problem.from_key(key), gpu_or_reference(str(run.about.get("gpu")))),
        "charts": charts_of(run, key),
        "entries": [
            (
                *(e.name, e.island, run.archive.bucket(e.score)),
                *(f"{math.exp(e.score):.3f}×", f"{e.us:.2f}", e.question, e.origin),
            )
            for e in entries
        ],
        "best": name,
        "text": text,
        "changes": [(parent, difference(run.text(key, parent), text, (parent, name))) for parent in parents],
    }


def _facts(run: EvolveRun) -> dict[str, Any]:
    about = run.about
    origin = about.get("provenance") or {}
    facts: dict[str, Any] = {"run": run.path.resolve().name, "device": about["device"]}
    facts |= {f: origin.get(f) for f in PROVENANCE_FIELDS}
    facts |= {f"recording: {f}": v for f, v in (about.get("recording") or {}).items()}
    return facts | {f: about.get(f) for f in ("started", "finished", "models", "settings") if about.get(f)}
