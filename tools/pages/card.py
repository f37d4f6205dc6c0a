"""A picture of the pages: a figure of Matplotlib on a card, with colours for readers of light and dark pages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from outblas_lab.publish.drawing import SOFT, svg_content
from outblas_lab.publish.palette import GREY, GRID, INK

QUIET = "#c4cad0"
#: Size of a picture's text in points. A picture is 640 points wide, and a page may show it at 400 pixels: 9 are left.
PICTURE_SIZE = 15
#: Colours of a picture on a dark card, by those on a light one.
_DARK = {
    INK: "#e6edf3",
    SOFT: "#9da7b3",
    GREY: "#8b949e",
    GRID: "#262c34",
    "#ffffff": "#0d1117",
    "#d0d7de": "#30363d",
    **{QUIET: "#484f58", "#c2570c": "#f0883e", "#0b5fcc": "#58a6ff"},
}


def outer_ticks_within(ticks: Sequence[Any]) -> None:
    """Align the labels of the first and the last tick to the inside, so that panels beside each other stay apart."""
    for tick, side in ((ticks[0], "left"), (ticks[-1], "right")):
        tick.label1.set_horizontalalignment(side)


def picture(figure: Any, title: str, below: Sequence[str], description: str, drawn: Any) -> str:
    """Return a whole SVG file on a card: its colours follow the reader's preference for light or dark.

    Args:
        figure: a ``matplotlib.figure.Figure`` of 72 dots per inch, with room at its top for the texts.
        description: the figure in words, for who cannot see it.
        drawn: JSON of all that is drawn, whose digest tells whether a picture is current.
    """
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    digest = hashlib.sha256(json.dumps([title, list(below), description, drawn]).encode()).hexdigest()
    dark = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {colour} !important; }} '
        for light, colour in _DARK.items()
        for kind in ("fill", "stroke")
    )
    lines = "\n".join(
        f'<text x="20" y="{56 + 21 * place}" style="font-size: {PICTURE_SIZE}px; fill: {SOFT}">{escape(line)}</text>'
        for place, line in enumerate(below)
    )
    font = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img" aria-labelledby="t d" data-drawn="{digest}">
<title id="t">{escape(title)}</title><desc id="d">{escape(description)}</desc>
<style>text {{ font-family: {font} !important; }} path, use {{ stroke-linejoin: round; }}
@media (prefers-color-scheme: dark) {{ {dark}}}</style>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" style="fill: #ffffff; stroke: #d0d7de"/>
<text x="20" y="32" style="font-size: 18px; font-weight: 600; fill: {INK}">{escape(title)}</text>
{lines}
{svg_content(figure, "picture")}
</svg>
"""


def current_picture(old: str, new: str) -> str:
    """Return the old picture if it shows the same data as the new one: another Matplotlib writes other bytes for it.

    So a change of the drawing alone needs the old picture deleted before ``tools/published_pages.py --write``.
    """
    digests = [re.search(r' data-drawn="(\w+)"', text) for text in (old, new)]
    same = all(digests) and len({found[1] for found in digests if found}) == 1
    return old if same else new
