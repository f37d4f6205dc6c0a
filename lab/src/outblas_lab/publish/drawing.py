"""Figures of Matplotlib as SVG for pages and pictures: text stays text, and nothing of the reader's setup counts."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outblas.core.install_hint import needed
from outblas_lab.publish.palette import GREY, GRID, INK

SOFT = "#57606a"
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


def _with_one_style(found: re.Match[str]) -> str:
    """Write the style of equal marks once, at their group."""
    marks = found[2].replace(f' style="{found[3]}"', "")
    return f'<g {found[1]} style="{found[3]}">{marks}</g>'
