"""The report page of an evolution: outcomes, spending, and the progress, lineage and best kernel of every problem."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.records.results import PROVENANCE_FIELDS
from outblas_lab.jail.plausibility import PLAUSIBLE_SHARE
from outblas_lab.llm.feedback import OUTCOME_KINDS
from outblas_lab.publish.html import definitions as terms
from outblas_lab.publish.html.charts import Chart, chart_html
from outblas_lab.publish.html.evolve_data import MAX_ANCESTORS, EvolveRun, GroupTotals
from outblas_lab.publish.html.figures import gpu_or_reference
from outblas_lab.publish.html.lineage import code_html, difference_html, lineage_chart, progress_chart
from outblas_lab.publish.html.shell import cards_html, fact_text, html_page, provenance_section, table
from outblas_lab.publish.words import date_words


def render_evolution(run: EvolveRun) -> str:
    """Return the whole page as text; the same run gives the same text."""
    gpu = str(run.about.get("gpu") or "an unfinished run")
    count = len(run.problems)
    charts = [_charts(run, key) for key in run.problems]
    body = "\n".join(
        [
            terms.definitions_html(_definitions(run)),
            _overall(run),
            *(_section(run, key, drawn, i) for i, (key, drawn) in enumerate(zip(run.problems, charts, strict=True))),
            _provenance(run),
        ]
    )
    groups = [
        {"title": key, "figures": {name: chart.payload() for name, chart in drawn.items()}}
        for key, drawn in zip(run.problems, charts, strict=True)
    ]
    title = f"OutBLAS evolution: {count} problem{'' if count == 1 else 's'} on {gpu}"
    return html_page(title, _origin(run), body, {"provenance": run.about.get("provenance"), "groups": groups})


def _charts(run: EvolveRun, key: str) -> dict[str, Chart]:
    answered = run.of(key)
    points = [
        (count, o.ratio, o.answer)
        for count, (_, o) in enumerate(answered, 1)
        if o.kind == "proven" and o.ratio is not None
    ]
    best = run.archive.best(key)
    return {
        "curve": progress_chart(points, _floor_ratio(run, key)),
        "tree": lineage_chart(run.lineage(key, best.name) if best else []),
    }


def _floor_ratio(run: EvolveRun, key: str) -> float | None:
    """Return the fastest baseline over the floor, as last measured; None if no baseline was measured."""
    times = [e.baselines_us for (problem, _), e in run.evaluations.items() if problem == key and e.baselines_us]
    gpu = gpu_or_reference(str(run.about.get("gpu")))
    return min(times[-1].values()) / floor_us(Problem.from_key(key), gpu) if times else None


def _origin(run: EvolveRun) -> str:
    about = run.about
    models = ", ".join(m["name"] for m in about["models"])
    recorded = about.get("recording")
    ended = f" It ended: {about['ended']}." if about.get("ended") else " It has not ended."
    who = f"Kernels by {escape(models)}.{escape(ended)}"
    if recorded:
        text = (
            f"Times come from <strong>recorded measurements of {escape(fact_text(recorded.get('gpu')))}, "
            f"{escape(date_words(recorded.get('date')))}</strong>. Candidates without a record were compiled and not "
            "run."
        )
        return f"<p class='origin replay'>{text} {who}</p>"
    if about["device"] == "compile":
        return (
            f"<p class='origin replay'><strong>Nothing was run</strong>: the candidates were only compiled. {who}</p>"
        )
    measured = (about.get("provenance") or {}).get("gpu") or about["device"]
    return f"<p class='origin'>Measured on {escape(str(measured))}. {who}</p>"


def _overall(run: EvolveRun) -> str:
    spent = run.spent
    best = [entry for key in run.problems if (entry := run.archive.best(key)) is not None]
    mean = math.exp(sum(e.score for e in best) / len(best)) if best else None
    proven = dict(run.kinds()).get("proven", 0)
    cards = [
        ("geomean", "none" if mean is None else f"{mean:.3f}×", "Geometric mean of the best kernels",
         f"at least, over <b>{len(best)} of {len(run.problems)}</b> problems"),
        ("proven", f"{proven} of {len(run.outcomes)}", "Answers proven correct", ""),
        ("usd", f"{spent.usd:.4f} USD" if spent.usd else "no price", "Spent",
         f"<b>{spent.requests}</b> requests, <b>{spent.prompt_tokens}</b> tokens of prompts and "
         f"<b>{spent.answer_tokens}</b> of answers"),
    ]  # fmt: skip
    kinds = [(kind, count, OUTCOME_KINDS[kind]) for kind, count in run.kinds()]
    attempts = sorted(run.attempts.items())
    parts = [
        f"<section aria-labelledby='all'><h2 id='all'>All problems</h2>{cards_html(cards)}",
        table("Outcomes of the answers", ("Outcome", "Answers", "Meaning"), kinds),
        _sides("Kernels as code against knobs of the kernel families", "Answer", run.by_answer()),
        _sides("Models", "Model", run.by_model()),
        table("Requests to the server, with repetitions", ("Attempt", "Requests"), attempts),
    ]
    return "\n".join([*parts, "</section>"])


def _sides(caption: str, what: str, sides: list[GroupTotals]) -> str:
    head = (what, "Answers", "Proven", "New bests", "Gain", "Requests", "Tokens", "USD", "Gain per 100k tokens")
    lines = []
    for s in sides:
        per = f"{100e3 * s.gain / s.spent.tokens:.3f}" if s.spent.tokens else "none"
        proven, gain, usd = s.kinds["proven"], f"{s.gain:.3f}", f"{s.spent.usd:.4f}"
        answers = sum(s.kinds.values())
        lines.append((s.name, answers, proven, s.new_bests, gain, s.spent.requests, s.spent.tokens, usd, per))
    return table(caption, head, lines)


def _section(run: EvolveRun, key: str, charts: dict[str, Chart], index: int) -> str:
    problem, best = Problem.from_key(key), run.archive.best(key)
    gpu = gpu_or_reference(str(run.about.get("gpu")))
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>{escape(key)}</h2>",
        f"<p class='note'>The floor is {floor_us(problem, gpu):.2f} µs.</p>",
        chart_html(charts["curve"], index, "curve", "Progress",
                   "Every proven kernel. The solid line at 1 is the baseline, the dotted line is the floor."),
        "<h3>Archive</h3>",
        _archive(run, key),
    ]  # fmt: skip
    if best is not None:
        parts += [
            "<h3>Lineage of the best</h3>",
            chart_html(charts["tree"], index, "tree", "Lineage", "The best kernel is at the right. An edge starts at "
                       "each kernel that the model was shown or has corrected. At most the nearest "
                       f"{MAX_ANCESTORS} are drawn."),
            "<h3>The best kernel</h3>",
            *_best(run, key, best.name),
        ]  # fmt: skip
    return "\n".join([*parts, "</section>"])


def _archive(run: EvolveRun, key: str) -> str:
    entries = sorted(run.archive.of(key), key=lambda e: -e.score)
    if not entries:
        return "<p class='note'>No kernel was proven on this problem.</p>"
    lines = [
        (
            e.name,
            e.island,
            run.archive.bucket(e.score),
            f"{math.exp(e.score):.3f}×",
            f"{e.us:.2f}",
            e.question,
            e.origin,
        )
        for e in entries
    ]
    head = ("Candidate", "Island", "Bucket", "Speed-up ≥", "µs", "Question", "Origin")
    return table(f"{len(entries)} places of the archive, fastest first", head, lines)


def _best(run: EvolveRun, key: str, name: str) -> list[str]:
    text = run.text(key, name)
    parts = [f"<p class='note'>{escape(name)}</p>", code_html(text)]
    node = next((n for n in run.lineage(key, name) if n.name == name), None)
    for parent in node.parents if node else ():
        parts += [
            f"<h4>Changes against {escape(parent)}</h4>",
            difference_html(run.text(key, parent), text, (parent, name)),
        ]
    return parts


def _definitions(run: EvolveRun) -> list[terms.Definition]:
    return [
        terms.SPEEDUP,
        ("At least", "The lower end of the 95% interval of the speed-up. The archive ranks kernels by it."),
        (
            "Gain",
            "The logarithm of the factor by which an answer raised the best speed-up of its problem. "
            "Gains start at 1×, and they are added up.",
        ),
        terms.floor_definition(gpu_or_reference(str(run.about.get("gpu")))),
        (
            "Too fast",
            f"A candidate with a time below {PLAUSIBLE_SHARE:.0%} of the least plausible time is rejected.",
        ),
        (
            "Selection bias",
            "The archive chose the best kernels by these very times, so they look slightly too good.",
        ),
        ("Tokens", "A request that was lost on the way counts with the most tokens that it can have taken."),
        (
            "Island, bucket",
            "The archive keeps separate populations (islands). A bucket of an island holds kernels of similar speed.",
        ),
    ]


def _provenance(run: EvolveRun) -> str:
    about = run.about
    origin = about.get("provenance") or {}
    facts: dict[str, Any] = {"run": run.path.resolve().name, "device": about["device"]}
    facts |= {f: origin.get(f) for f in PROVENANCE_FIELDS}
    facts |= {f"recording: {f}": v for f, v in (about.get("recording") or {}).items()}
    facts |= {f: about.get(f) for f in ("started", "finished", "models", "settings") if about.get(f)}
    return provenance_section(facts)
