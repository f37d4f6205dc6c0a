"""Sanitise text from outside, e.g. from a compiler or a server, before it is stored, printed or sent."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Control characters (C0 and C1) except tab and newline, and characters that reverse the direction of a terminal's
#: text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

#: A width or height of a terminal, in characters.
_SIZE = re.compile("[1-9][0-9]{0,3}")


def clean_text(text: str, limit: int | None = None) -> str:
    """Return text that is valid UTF-8 and contains no terminal control characters.

    Args:
        limit: maximum length in characters, 0 or more; applied before cleaning. None: no limit.

    Returns:
        The first ``limit`` characters, with CRLF as LF, lone surrogates as "?", and other control characters removed.
            Tab and newline stay; a CR without LF goes. Only the escape character of a colour code goes.

    Example: ``clean_text("a\\r\\nb\\x1b[1mc")`` returns ``"a\\nb[1mc"``.
    """
    cut = text[:limit].replace("\r\n", "\n")
    return _CONTROLS.sub("", cut.encode("utf-8", "replace").decode("utf-8"))


def clean_sizes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without a ``COLUMNS`` or ``LINES`` that is no number from 1 to 9999.

    rich prints nothing on 0 columns, and raises ValueError for a superscript digit.
    """
    sizes = ("COLUMNS", "LINES")
    return {name: text for name, text in environment.items() if name not in sizes or _SIZE.fullmatch(text)}
