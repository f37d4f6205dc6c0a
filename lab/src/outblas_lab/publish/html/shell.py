"""The frame of a report page: one HTML file with everything in it, its cards, tables and copied lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from outblas_lab.pool.counters import COUNTER_COLUMNS
from outblas_lab.publish.html.heat import heat_css
from outblas_lab.publish.words import date_words

#: Only inline content may load: the browser itself refuses every request.
_CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

#: Columns of words; every other column holds figures and aligns right.
_TEXT = frozenset(
    {
        "Regime",
        "PDL",
        "Problem",
        "Weight",
        "M",
        "Baseline",
        "Why",
        "Fact",
        "Agent",
        "Outcome",
        "Answer",
        "Candidate",
        "Model",
        "Attempt",
        "Origin",
        "Figure",
        COUNTER_COLUMNS[-1],
    }
)
#: Columns of words that may be long. They break into lines: prose always, names only where there is room.
_PROSE = frozenset({"Value", "Meaning", "Proved at M"})
_LONG = frozenset({"Kernel", "Overlaps", "Without PDL", "With PDL", "Constant weights"})
#: Characters up to which a heading stays on one line.
_SHORT = 10
#: Items of a list that a fact shows at most.
_LISTED = 12
#: First line of a page, and the id of its data, which the script reads.
_FIRST_LINE, _DATA_ID = "<!DOCTYPE html>", "outblas-data"
#: Rows from which a table can be searched and scrolls in a box.
SEARCHED_ROWS = 12

Card = tuple[str, str, str, str]


def is_page(data: bytes) -> bool:
    """Return True if a file's content is that of :func:`html_page`."""
    return data.startswith(_FIRST_LINE.encode()) and f'id="{_DATA_ID}"'.encode() in data


def html_page(title: str, header: str, body: str, data: Mapping[str, Any]) -> str:
    """Return the whole page.

    Args:
        title: title of the window and the page, as text.
        header: HTML below the title.
        body: HTML of the sections.
        data: embedded as JSON; the script reads ``data["groups"][i]["figures"]``.
    """
    return f"""{_FIRST_LINE}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_CSP}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{page_style()}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>{header}</header>
<main>
{body}
</main>
<script type="application/json" id="{_DATA_ID}">{_json(data)}</script>
<script>{page_script()}</script>
</body>
</html>
"""


def cards_html(cards: Iterable[Card]) -> str:
    """Return large cards as an HTML list, ``<ul class='cards'>``.

    Args:
        cards: (name, figure, label, a second line as HTML or an empty text) each. The first three are escaped.
    """
    items = "".join(
        f"<li class='card {name}' data-figure='{name}'><span>{escape(label)}</span><strong>{escape(value)}</strong>"
        f"{f'<small>{more}</small>' if more else ''}</li>"
        for name, value, label, more in cards
    )
    return f"<ul class='cards'>{items}</ul>"


def copy_html(words: str, line: str) -> str:
    """Return a line of code with a button that copies it, under a sentence, as HTML. Both texts are escaped."""
    return (
        f"<p class='note'>{escape(words)}</p><div class='copy'><code tabindex='0'>{escape(line)}</code>"
        "<button type='button' data-copy>Copy</button></div>"
    )


def fact_text(value: Any) -> str:
    """Return a fact in words: of a mapping ``key value`` pairs joined by commas, of a list its first items.

    Examples: ``{"torch": "2.11", "n": 3}`` gives ``"torch 2.11, n 3"``, ``[1, 2]`` gives ``"1, 2"``, None gives
    ``"None"``.
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact_text(v)}" for key, v in value.items())
    if not isinstance(value, list):
        return str(value)
    more = [f"and {len(value) - _LISTED} more"] if len(value) > _LISTED else []
    return ", ".join([*map(fact_text, value[:_LISTED]), *more])


def provenance_section(facts: Mapping[str, Any]) -> str:
    """Return the section with the origin of the figures.

    Args:
        facts: name -> fact; a date is written in words.
    """
    lines = [
        (name, date_words(value) if name.endswith(("date", "started", "finished")) else fact_text(value))
        for name, value in facts.items()
    ]
    found = table("Where these figures come from", ("Fact", "Value"), lines, searched=False)
    return f"<section aria-labelledby='provenance'><h2 id='provenance'>Provenance</h2>{found}</section>"


def table(
    caption: str,
    head: Sequence[str],
    lines: Iterable[Sequence[Any]],
    searched: bool | None = None,
    attributes: str = "",
) -> str:
    """Return a table in a box that scrolls; the page's script lets readers sort it.

    Args:
        caption: title of the table.
        head: names of the columns.
        lines: cells of every row; the first cell is the row's header.
        searched: add a search field and limit the height; by default if the table has :data:`SEARCHED_ROWS`.
        attributes: more attributes of the box, as HTML.
    """
    names = [_class_of(h) for h in head]
    cls = [f" class='{name}'" if name else "" for name in names]
    top = "".join(
        f"<th scope='col' class='{name}{' short' if len(h) <= _SHORT else ''}'>{escape(h)}</th>"
        for h, name in zip(head, names, strict=True)
    )
    rows = [
        f"<tr><th scope='row'>{escape(str(line[0]))}</th>"
        + "".join(f"<td{c}>{escape(str(v))}</td>" for v, c in zip(line[1:], cls[1:], strict=True))
        + "</tr>"
        for line in lines
    ]
    limited = len(rows) >= SEARCHED_ROWS if searched is None else searched
    return (
        f"<div class='box{' searched' if limited else ''}'{attributes}><div class='scroll' tabindex='0' role='region' "
        f"aria-label='{escape(caption)}'><table><caption><span>{escape(caption)}</span></caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _class_of(heading: str) -> str:
    """Return the CSS classes of a column."""
    if heading in _PROSE:
        return "text long prose"
    if heading in _LONG:
        return "text long"
    return "text" if heading in _TEXT else ""


def _json(data: Any) -> str:
    """Return JSON that no content can end early: ``<``, ``>`` and ``&`` are escaped."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def page_style() -> str:
    """Return the style sheet of a page."""
    return _read("page.css") + heat_css()


@cache
def page_script() -> str:
    """Return the script of a page."""
    return _read("page.js")


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
