"""Style and script of the report page, which are inlined into it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from outblas.publish.html.heat import heat_css


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
