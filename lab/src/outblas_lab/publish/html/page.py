"""Report pages: one HTML file each, made of the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from outblas.core.install_hint import needed
from outblas.core.stats import LOSS_BELOW
from outblas_lab.publish.words import date_words

#: First line of a page, and the id of its data, which the script reads.
_FIRST_LINE, _DATA_ID = "<!DOCTYPE html>", "outblas-data"
#: Items of a list that a fact shows at most.
_LISTED = 12
#: Rows from which a table can be searched and scrolls in a box.
SEARCHED_ROWS = 12


def is_page(data: bytes) -> bool:
    """Return True if a file's content is that of :func:`page_text`."""
    return data.startswith(_FIRST_LINE.encode()) and f'id="{_DATA_ID}"'.encode() in data


def page_text(template: str, data: Mapping[str, Any], **content: Any) -> str:
    """Return a whole page.

    Args:
        data: embedded as JSON; the script reads ``data["groups"][i]["figures"]``.

    Raises:
        ToolchainMissing: Jinja2 is not installed.
    """
    return str(templates().get_template(template).render(data=data, **content))


@cache
def templates() -> Any:
    """Return the ``jinja2.Environment`` of the templates.

    Raises:
        ToolchainMissing: Jinja2 is not installed.
    """
    jinja2 = needed("jinja2", "Jinja2, which fills reports", "report")
    folder = Path(__file__).with_name("templates")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.globals |= {"LOSS_BELOW": LOSS_BELOW, "SEARCHED_ROWS": SEARCHED_ROWS}
    made.filters |= {"date_words": date_words, "fact_text": fact_text, "fact_lines": fact_lines}
    return made


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


def fact_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each fact; dates are in words, and commits have seven digits."""
    words = {"date": date_words, "started": date_words, "finished": date_words, "commit": _short_commits}
    return [(name, words.get(name.split(": ")[-1], fact_text)(value)) for name, value in facts.items()]


def _short_commits(value: Any) -> str:
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]+", r"\1", fact_text(value))
