"""Figures of Matplotlib as SVG for pages and pictures: text stays text, and nothing of the reader's setup counts."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from outblas.core.install_hint import needed
from outblas_lab.publish.palette import GREY, GRID, INK

SOFT, QUIET = "#57606a", "#c4cad0"
#: Size of a picture's text in points. A picture is 640 points wide, and a page may show it at 400 pixels: 9 are left.
PICTURE_SIZE = 15
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollar signs
    "path.simplify": False,  # a page's script finds every point of a line
    "figure.dpi": 72,  # one unit of the SVG is one point
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": SOFT,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "grid.color": GRID,
    "lines.linewidth": 2.5,
    **{f"{axis}tick.{name}": 0 for axis in "xy" for name in ("major.size", "minor.size")},
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("major.pad", 6), ("labelcolor", SOFT))},
}
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
#: What the page says once, and ids that no reference names. An artist's gid may be ``class-NAME``.
_LEFT_OUT = (
    (r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*; ?", ""),
    (r' id="[\w.]+_\d+"', ""),
    (r' id="class-(\w+)"', r' class="\1"'),
    (r"\s+", " "),
    (r"(?<=>) (?=<)", ""),
)


@contextmanager
def drawing(size: int = 12) -> Iterator[None]:
    """Give Matplotlib the style of all figures; they are made and saved within. It is a decorator, too.

    Args:
        size: of texts, in points.

    Raises:
        ToolchainMissing: Matplotlib is not installed.
    """
    matplotlib = needed("matplotlib", "Matplotlib", "report")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "font.size": size})
        yield


@drawing()
def svg_content(figure: Any, name: str) -> str:
    """Return what stands between ``<svg>`` and ``</svg>``; the same figure and name give the same text.

    Args:
        name: part of every id, so that figures of one page share none.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    content = out.getvalue().partition("<svg")[2].partition(">")[2].rpartition("</svg>")[0]
    for pattern, text in _LEFT_OUT:
        content = re.sub(pattern, text, content, flags=re.DOTALL)
    content = re.sub(r'<g ([^>]*)>(<use [^>]* style="([^"]*)"/>(?:<use [^>]*/>)*)</g>', _with_one_style, content)
    return re.sub(
        r' (?:d|x|y)="[^"]*"',
        lambda found: re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", found[0]),
        content,
    ).strip()


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

    So a change of the drawing alone needs the old picture deleted before ``outblas results --write``.
    """
    digests = [re.search(r' data-drawn="(\w+)"', text) for text in (old, new)]
    same = all(digests) and len({found[1] for found in digests if found}) == 1
    return old if same else new


def _with_one_style(found: re.Match[str]) -> str:
    """Write the style of equal marks once, at their group."""
    marks = found[2].replace(f' style="{found[3]}"', "")
    return f'<g {found[1]} style="{found[3]}">{marks}</g>'
