"""The table of every summary row, with the notes that its lines cannot hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from outblas.publish.words import mean_in_words
from outblas.records.averages import launch_label, launch_of_row, table_label
from outblas.records.results import MODES

#: The launch option as notes have it.
_FLAGS = {"plain": "without PDL", "pdl": "with PDL", "weights": "with constant weights"}
#: Figures of a server's median latency over one baseline, and how the table's notes name it.
_SERVED_OVER = {
    "geomean_torch": "over torch.matmul",
    "geomean_lt_auto": "over a native call of cuBLASLt with the algorithm chosen",
}
#: Figures over what is no rival, and how the table's notes name it.
_UNRANKED = {
    "geomean_torch_full": "torch.matmul with its two switches of reduced-precision reductions off",
    "geomean_lt_edges": "cuBLASLt with programmatic edges on its captured nodes, which is not safe",
}


def markdown_table(rows: Sequence[dict[str, Any]], more_notes: Sequence[str] = ()) -> str:
    """Return the table of every summary row in Markdown, with its notes and its provenance.

    Args:
        more_notes: lines of Markdown that follow the table's own notes.
    """
    head = ["suite", "layout", "types", "mode", "PDL", "problems", "geometric mean", "FLOP-weighted", "worst"]
    head += ["losses", "below 0.98", "fall-backs", "over torch"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 5 + " ---: |" * 8]
    for r in sorted(rows, key=_order):
        parts = {f"{r['suite']}, {name}": {**r, **part} for name, part in r.get("by_alignment", {}).items()}
        lines += [_line(name, figures) for name, figures in {r["suite"]: r, **parts}.items()]
    notes = [*_notes(rows), *more_notes]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured on {_cell(_measured_on(rows))}."])


def _line(suite: str, r: dict[str, Any]) -> str:
    cells = [suite, r["layout"], f"{r['dtype']}/{r['acc']}", r["mode"], launch_label(r), r["n"]]
    cells += [mean_in_words(r["geomean"], r["interval"], r.get("bootstrap"))]
    torch = r.get("geomean_torch")
    cells += [*(f"{r[f]:.3f}×" for f in ("flop_weighted", "min")), r["losses"], r["below_098"], r["fallbacks"]]
    return "| " + " | ".join(map(_cell, [*cells, "–" if torch is None else f"{torch:.3f}×"])) + " |"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Hot before cold before server, grid1000 before llm, fp32 accumulation before fp16, TN, NN, then best of both."""
    layouts = ("TN", "NN", "best")
    layout = layouts.index(row["layout"]) if row["layout"] in layouts else len(layouts)
    return (
        MODES.index(row["mode"]),
        row["suite"],
        row["acc"] != "fp32",
        row["dtype"] != "fp16",
        layout,
        row["pdl"],
        row["early"],
    )


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures that have no column: by M, plain choices, and latencies."""
    notes = []
    for r in sorted(rows, key=_order):
        name, flag = table_label(r["suite"], r), _FLAGS[launch_of_row(r)]
        if r.get("by_m"):
            parts = [f"M {m.replace('<=', '≤ ').replace('>', '> ')} {f['geomean']:.3f}×" for m, f in r["by_m"].items()]
            notes.append(f"- {name}, {flag}: {', '.join(parts)}")
        notes += [f"- {name}, {flag}: {r[f]:.3f}× over {whom}" for f, whom in _UNRANKED.items() if r.get(f) is not None]
        if second := r.get("plain_choice"):
            notes.append(
                f"- {name}, {flag}: {second['n']} rows have a second winner; "
                f"with the plain choice in every row {second['geomean']:.3f}×"
            )
        if own := r.get("less_clock"):
            text = f"the clock's own {own['us']:.1f} µs are in every time; less these, {own['geomean']:.3f}×"
            notes.append(f"- {name}, {flag}: {text}")
        if r.get("p99"):
            p50, p99 = (f"{r[q]['geomean']:.3f}×" for q in ("p50", "p99"))
            over = [f"{r[f]:.3f}× {of}" for f, of in _SERVED_OVER.items() if r.get(f) is not None]
            if r.get("p99_torch"):
                over.append(f"99th percentile {r['p99_torch']['geomean']:.3f}× over torch.matmul")
            notes.append(f"- {name}: {', '.join([f'median latency {p50}, 99th percentile {p99}', *over])}")
    return notes


def _measured_on(rows: Sequence[dict[str, Any]]) -> str:
    """GPUs and drivers, the first and last day, and the commits, each once."""

    def each(field: str) -> list[str]:
        return sorted({part for r in rows for part in str(r[field]).split("; ")})

    def short(name: str) -> str:
        return re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", name)

    days = sorted({date[:10] for date in each("date")})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = sorted({short(name) for name in each("commit")})
    what = "commit" if len(commits) == 1 else "commits"
    return f"{', '.join(each('gpu'))}, driver {', '.join(each('driver'))}, {when}, {what} {', '.join(commits)}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
