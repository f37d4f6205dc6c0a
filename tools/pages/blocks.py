"""Put a generated text between the markers of its block on a page."""

from __future__ import annotations

from outblas.core.errors import RecordError


def with_block(page: str, name: str, text: str, where: str) -> str:
    """Return a page's text with a block's new text between its markers.

    The markers are lines ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; they stay, and the text has lines of its
    own.

    Raises:
        RecordError: the page does not have each marker once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise RecordError(f"{where} has no markers for block {name}", f"{begin} and {end} once each", "add both lines")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
