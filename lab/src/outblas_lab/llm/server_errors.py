"""Errors of a server: their words, the wait before the next attempt, and their cost."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from outblas_lab.llm.bounded_http import REDIRECT

if TYPE_CHECKING:
    from openai import APIStatusError

#: Statuses that say: later, perhaps. A server that lacks a feature (501) will lack it then, too.
RETRIED_STATUSES = (frozenset({408, 409, 425, 429}) | frozenset(range(500, 600))) - {501}
#: Statuses that no later question will get past: the key, the address or the name of the model is wrong. An address
#: that points elsewhere is one: prompts go where they were meant to go, and nowhere else.
FATAL_STATUSES = frozenset({*range(300, 309), 401, 402, 403, 404, 405})
#: Statuses of gateways that waited in vain. The server behind them may have written the answer.
WAITED_IN_VAIN = frozenset({408, 504, 524})
#: Longest wait that a server's Retry-After is followed for, seconds.
MAX_RETRY_AFTER_S = 300.0
#: The wait after which a next attempt makes sense, if none does for any question.
NEVER = math.inf
#: Most characters of a page that is no error in JSON.
_PAGE_CHARS = 500


def wait_before_next(status: int) -> float | None:
    """Return the least wait that a status asks for, seconds: 0, None (not for this question) or :data:`NEVER`."""
    if status in FATAL_STATUSES:
        return NEVER
    return 0.0 if status in RETRIED_STATUSES else None


def wait_after_error(error: APIStatusError) -> float | None:
    """Return the least wait after an error, as :func:`wait_before_next` does, with the server's own wish.

    A spent quota is a 429 at OpenAI, and no wait ends it: ``NEVER``.
    """
    wait = wait_before_next(error.status_code)
    if wait != 0.0:
        return wait
    if "insufficient_quota" in (error.code, error.type):
        return NEVER
    return retry_after(error.response.headers, error.response.text)


def words_of_error(error: APIStatusError) -> str:
    """Return the server's words on its refusal, with the target of a redirect.

    Example: ``Error code: 401 - Unauthorized``. A body without a message is quoted, up to 500 characters.
    """
    words = error.message
    if words == f"Error code: {error.status_code}" and (page := error.response.text.strip()):
        words = f"{words} - {page[:_PAGE_CHARS]}"
    place = error.response.extensions.get(REDIRECT)
    return f"it points to {place}, which is not followed; {words}" if place else words


def retry_after(headers: Mapping[str, str], body: str = "") -> float:
    """Return the seconds that a server asks to wait, or 0 if it does not say; at most 300.

    The header is ``Retry-After`` (seconds or a date) or ``retry-after-ms``. Gemini says ``"retryDelay": "36s"`` in the
    body instead.
    """
    wait = 0.0
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError):
            return min(MAX_RETRY_AFTER_S, max(0.0, float(headers.get(name, "")) * unit))
    if delay := re.search(r'"retryDelay":\s*"(\d{1,9}(?:\.\d{1,9})?)s"', body):
        return min(MAX_RETRY_AFTER_S, float(delay[1]))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        wait = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time()
    return min(MAX_RETRY_AFTER_S, max(0.0, wait))
