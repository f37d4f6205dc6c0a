"""Words from outside, made fit to keep, to print and to send."""

from __future__ import annotations

import re

#: C0 and C1 controls but tab and end of line, and what reverses the direction of a terminal's text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean_text(text: str, limit: int | None = None) -> str:
    """Return text that every file can hold and no terminal obeys.

    Args:
        text: of a worker, a compiler or a server.
        limit: most characters that are kept; None: all.

    Returns:
        The text with "?" for each half of a surrogate pair, without control characters, cut at the limit.
    """
    cut = text[:limit].replace("\r\n", "\n")
    return _CONTROLS.sub("", cut.encode("utf-8", "replace").decode("utf-8"))
