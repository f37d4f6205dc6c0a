"""The frame of a report page: one HTML file with everything in it, Plotly included, and its tables and charts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from outblas.core.errors import ToolchainMissing
from outblas.publish.html.assets import CSS, JS
from outblas.runtime.counters import COUNTER_COLUMNS

#: Only what is inline may load: the browser itself refuses every request.
_CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

#: Columns of words; every other column holds figures and aligns right.
_TEXT = frozenset(
    {
        "Regime",
        "PDL",
        "Problem",
        "Baseline",
        "Config",
        "Status of ours",
        "Fact",
        "Agent",
        "Overlaps",
        "Outcome",
        "Answer",
        "Model",
        "Attempt",
        "Origin",
        COUNTER_COLUMNS[-1],
    }
)
#: Columns of words that may be long, and break.
_LONG = frozenset({"Value"})


def html_page(title: str, body: str, data: dict[str, Any]) -> str:
    """The whole page: ``body`` is HTML; ``data`` is embedded as JSON, ``data["groups"][i]["figures"]`` are drawn.

    Raises:
        ToolchainMissing: without plotly.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_CSP}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
{body}
<script type="application/json" id="outblas-data">{_json(data)}</script>
<script>{_plotly()}</script>
<script>{JS}</script>
</body>
</html>
"""


def chart(index: int, name: str, title: str, note: str) -> str:
    return (
        f"<figure><div class='plot {name}' id='{name}-{index}' data-group='{index}' data-figure-name='{name}' "
        f"role='img' aria-label='{escape(title)}'></div>"
        f"<figcaption><b>{escape(title)}.</b> {escape(note)}</figcaption></figure>"
    )


def date_text(date: Any) -> str:
    """A UTC time of ISO 8601 to the minute, as one reads it; anything else as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d(\.\d+)?(\+00:00|Z)", str(date))
    return f"{found[1]} {found[2]} UTC" if found else str(date)


def fact_text(value: Any) -> str:
    """A fact in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact_text(v)}" for key, v in value.items())
    return ", ".join(map(fact_text, value)) if isinstance(value, list) else str(value)


def how_to_read(points: Iterable[str]) -> str:
    """The section that says what figures mean, a point each."""
    items = "".join(f"<li>{escape(p)}</li>" for p in points)
    head = "<h2 id='method'>How to read this</h2>"
    return f"<section aria-labelledby='method'>{head}<ul class='note'>{items}</ul></section>"


def provenance_section(facts: Mapping[str, Any]) -> str:
    """The section that says where figures come from: name -> fact."""
    lines = [(name, fact_text(value)) for name, value in facts.items()]
    found = table("Where these figures come from", ("Fact", "Value"), lines)
    return f"<section aria-labelledby='provenance'><h2 id='provenance'>Provenance</h2>{found}</section>"


def table(caption: str, head: Sequence[str], lines: Iterable[Sequence[Any]], limited: bool = False) -> str:
    """A table in a scroll box, ``limited`` in height too; the first cell of a line is its header."""
    cls = [" class='text long'" if h in _LONG else " class='text'" if h in _TEXT else "" for h in head]
    top = "".join(f"<th scope='col'{c}>{escape(h)}</th>" for h, c in zip(head, cls, strict=True))
    body = "".join(
        f"<tr><th scope='row'>{escape(str(line[0]))}</th>"
        + "".join(f"<td{c}>{escape(str(v))}</td>" for v, c in zip(line[1:], cls[1:], strict=True))
        + "</tr>"
        for line in lines
    )
    return (
        f"<div class='scroll{' limited' if limited else ''}' tabindex='0' role='region' "
        f"aria-label='{escape(caption)}'><table>"
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _json(data: Any) -> str:
    """JSON that no content can end early: ``<``, ``>`` and ``&`` are escaped."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def check_tools() -> None:
    """Check that a page could be written.

    Raises:
        ToolchainMissing: without plotly.
    """
    _plotly()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ToolchainMissing("plotly is not installed", "plotly 5.18 or later", "pip install plotly") from error
    return str(get_plotlyjs())
