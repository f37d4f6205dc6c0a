"""The report page of an evolution: outcomes, spending, and of every problem progress, lineage and the best kernel."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from outblas.core.plausibility import PLAUSIBLE_SHARE_OF_FLOOR
from outblas.core.problem import Problem
from outblas.core.roofline import GPUS, H200, floor_us
from outblas.llm.feedback import OUTCOME_KINDS
from outblas.publish.html.evolve_data import MAX_ANCESTORS, EvolveRun, GroupTotals
from outblas.publish.html.lineage import code_html, difference_html, lineage_figure, progress_figure
from outblas.publish.html.shell import chart, date_text, fact_text, how_to_read, html_page, provenance_section, table
from outblas.records.results import PROVENANCE_FIELDS


def render_evolution(run: EvolveRun) -> str:
    """The whole page as text; the same for the same run.

    Raises:
        ToolchainMissing: without plotly.
    """
    gpu = str(run.about.get("gpu") or "an unfinished run")
    title = f"OutBLAS evolution: {len(run.problems)} problems on {gpu}"
    body = "\n".join(
        [
            f"<header><h1>{escape(title)}</h1>{_origin(run)}</header>",
            "<main>",
            _overall(run),
            *(_section(run, key, i) for i, key in enumerate(run.problems)),
            _method(),
            _provenance(run),
            "</main>",
            "<noscript><p class='note'>The charts need JavaScript; the tables do not.</p></noscript>",
        ]
    )
    groups = [{"title": key, "figures": _figures(run, key)} for key in run.problems]
    return html_page(title, body, {"provenance": run.about.get("provenance"), "groups": groups})


def _figures(run: EvolveRun, key: str) -> dict[str, Any]:
    answered = run.of(key)
    points = [
        (count, o.ratio, o.answer)
        for count, (_, o) in enumerate(answered, 1)
        if o.kind == "proven" and o.ratio is not None
    ]
    best = run.archive.best(key)
    return {
        "curve": progress_figure(points, _floor_ratio(run, key)),
        "tree": lineage_figure(run.lineage(key, best.name) if best else []),
    }


def _floor_ratio(run: EvolveRun, key: str) -> float | None:
    """The fastest baseline over the floor, as last measured; None where no baseline was."""
    times = [e.baselines_us for (problem, _), e in run.evaluations.items() if problem == key and e.baselines_us]
    gpu = GPUS.get(str(run.about.get("gpu")), H200)
    return min(times[-1].values()) / floor_us(Problem.from_key(key), gpu) if times else None


def _origin(run: EvolveRun) -> str:
    about = run.about
    models = ", ".join(m["name"] for m in about["models"])
    recorded = about.get("recording")
    ended = f" It ended: {about['ended']}." if about.get("ended") else " It has not ended."
    who = f"Kernels by {escape(models)}.{escape(ended)}"
    if recorded:
        text = (
            f"Candidates were answered from <strong>recorded measurements of {escape(fact_text(recorded.get('gpu')))}, "
            f"{escape(date_text(recorded.get('date')))}</strong>; others were compiled and not run."
        )
        return f"<p class='origin replay'>{text} {who}</p>"
    if about["device"] == "compile":
        return f"<p class='origin replay'><strong>Nothing was run</strong>: candidates were compiled only. {who}</p>"
    measured = (about.get("provenance") or {}).get("gpu") or about["device"]
    return f"<p class='origin'>Measured on {escape(str(measured))}. {who}</p>"


def _overall(run: EvolveRun) -> str:
    spent = run.spent
    best = [entry for key in run.problems if (entry := run.archive.best(key)) is not None]
    mean = math.exp(sum(e.score for e in best) / len(best)) if best else None
    proven = dict(run.kinds()).get("proven", 0)
    cards = [
        ("geomean", "none" if mean is None else f"{mean:.3f}×", f"geometric mean of the best, at least ({len(best)} "
         f"of {len(run.problems)} problems)"),
        ("proven", f"{proven} of {len(run.outcomes)}", "answers proven right"),
        ("requests", str(spent.requests), "requests"),
        ("tokens", f"{spent.prompt_tokens} + {spent.answer_tokens}", "tokens of prompts and answers"),
        ("usd", f"{spent.usd:.4f} USD" if spent.usd else "no price", "spent"),
    ]  # fmt: skip
    items = "".join(
        f"<li class='card {name}' data-figure='{name}'>"
        f"<strong>{escape(value)}</strong><span>{escape(label)}</span></li>"
        for name, value, label in cards
    )
    kinds = [(kind, count, OUTCOME_KINDS[kind]) for kind, count in run.kinds()]
    attempts = sorted(run.attempts.items())
    parts = [
        f"<section aria-labelledby='all'><h2 id='all'>Overall</h2><ul class='cards'>{items}</ul>",
        table("What became of the answers", ("Outcome", "Answers", "Value"), kinds),
        _sides("Kernels as text against knobs of our families", "Answer", run.by_answer()),
        _sides("Models", "Model", run.by_model()),
        table("Attempts at the server, repeated ones included", ("Attempt", "Requests"), attempts),
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


def _section(run: EvolveRun, key: str, index: int) -> str:
    problem, best = Problem.from_key(key), run.archive.best(key)
    gpu = GPUS.get(str(run.about.get("gpu")), H200)
    parts = [
        f"<section aria-labelledby='g{index}'><h2 id='g{index}'>{escape(key)}</h2>",
        f"<p class='note'>The floor is {floor_us(problem, gpu):.2f} µs.</p>",
        chart(index, "curve", "Progress", "Every proven kernel. Solid line: the baseline; dotted: the floor."),
        "<h3>Archive</h3>",
        _archive(run, key),
    ]
    if best is not None:
        parts += [
            "<h3>Lineage of the best</h3>",
            chart(index, "tree", "Lineage", "The best kernel is at the right; an edge leads from each kernel that its "
                  f"model was shown or has corrected, of the {MAX_ANCESTORS} nearest. Filled: proven."),
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
    head = ("Config", "Island", "Bucket", "Speed-up, at least", "µs", "Question", "Origin")
    return table(f"{len(entries)} places of the archive, fastest first", head, lines, limited=True)


def _best(run: EvolveRun, key: str, name: str) -> list[str]:
    text = run.text(key, name)
    parts = [f"<p class='note'>{escape(name)}</p>", code_html(text)]
    node = next((n for n in run.lineage(key, name) if n.name == name), None)
    for parent in node.parents if node else ():
        parts += [
            f"<h4>What it changed of {escape(parent)}</h4>",
            difference_html(run.text(key, parent), text, (parent, name)),
        ]
    return parts


def _method() -> str:
    points = [
        "Speed-up: median over interleaved rounds of time of the fastest baseline / time of the kernel, same problem. "
        "At least: the lower end of its 95% interval, by which the archive ranks.",
        "Gain: log of how much the best speed-up of a problem rose by an answer, from 1 on, summed up.",
        f"A time below {PLAUSIBLE_SHARE_OF_FLOOR:.0%} of the floor is not believed: such a candidate is rejected. "
        "The floor is made of measured, sustained rates.",
        "Selection bias: the best kernels are shown with the times that they were chosen by, which flatters them a "
        "little.",
        "Tokens of a request that was lost on the way are counted at the most that it can have taken.",
    ]
    return how_to_read(points)


def _provenance(run: EvolveRun) -> str:
    about = run.about
    origin = about.get("provenance") or {}
    facts: dict[str, Any] = {"run": run.path.resolve().name, "device": about["device"]}
    facts |= {f: origin.get(f) for f in PROVENANCE_FIELDS}
    facts |= {f"recording: {f}": v for f, v in (about.get("recording") or {}).items()}
    facts |= {f: about.get(f) for f in ("started", "finished", "models", "settings") if about.get(f)}
    return provenance_section(facts)
