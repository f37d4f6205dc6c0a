"""A server's reply to one attempt, made safe to keep: its text, its reason to stop, and its cost."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from outblas.core.clean_text import clean_text
from outblas.llm.bounded_http import FAILURE_BYTES
from outblas.llm.budget import Cost, Price, at_least

#: Longest answer, and longest thoughts, that are kept, characters; the largest kernel has a quarter of that.
ANSWER_CHARS = 1 << 20
#: Of the words of a server that has no answer, and of why a model stopped.
_FAILURE_CHARS, _FINISH_CHARS = 2000, 40
#: Replacements for C's white space among the control characters.
_SPACES = str.maketrans({"\r": "\n", "\v": " ", "\f": " "})
#: More tokens than any server counts; what says more is no count.
_MOST_TOKENS = 10**9
#: A key of fewer characters is none (a server of one's own takes any word), and may be part of other words.
_LEAST_KEY = 8


@dataclass(frozen=True)
class Reply:
    """Reply to one attempt. The property ``answered`` is True if the outcome is ``answered``.

    Attributes:
        outcome: ``answered``, ``http <status>``, ``timeout``, ``dropped`` or ``unreadable``. A record that is read back
            may say ``lost``: a process was killed before the reply came.
        text: the answer, or the server's explanation.
        finish: the model's reason to stop, as the server says: ``stop``, ``length``, ``content_filter`` or the like;
            ``refusal`` for a marked refusal. It is "" if unknown.
        took: charge to the budget: the server's own count, or the most that it can have been.
        seconds: time from sending to the outcome.
        reasoning: the model's thoughts, if the server sends them; else "".
    """

    outcome: str
    text: str
    finish: str
    took: Cost
    seconds: float
    reasoning: str = ""

    @property
    def answered(self) -> bool:
        return self.outcome == "answered"


def read_completion(body: bytes, most: Cost, price: Price, seconds: float) -> Reply:
    """Return the answer in a server's body. A text of over 2**20 characters is cut, with ``finish`` ``length``.

    Example: the body ``b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'`` gives a reply whose
    ``text`` is ``"hi"`` and whose ``finish`` is ``"stop"``.

    Args:
        body: the server's body, of unknown content.
        most: the most that the request can have cost. It is charged if the server's count of tokens is missing, no
            integer, negative or above 10**9, or if it counts no prompt.
        price: price of the model.
        seconds: time from sending to the answer.

    Returns:
        A reply with the outcome ``answered``, even if its text is "". Its ``finish`` is ``refusal`` if the server marks
        one. Too small a count of tokens is raised to the least that the texts can have cost
        (:func:`outblas.llm.budget.at_least`).

    Raises:
        ValueError: the body has no answer.
    """
    message, choice, usage = _parts(body)
    refusal = message.get("refusal")
    text = message.get("content") or refusal or ""
    if not isinstance(text, str):
        raise ValueError(f"the answer is {type(text).__name__}")
    finish = "refusal" if refusal else _word(choice.get("finish_reason"), _FINISH_CHARS)
    if len(text) > ANSWER_CHARS:
        finish = "length"
    # No part of the interface, but what servers of reasoning models call it.
    thought = _word(message.get("reasoning_content") or message.get("reasoning"), ANSWER_CHARS)
    # Compilers and readers of an answer take these for the end of a line, and for blanks.
    text = clean_text(text.replace("\r\n", "\n").translate(_SPACES), ANSWER_CHARS)
    took = _took(usage, most, price, len(text.encode()) + len(thought.encode()))
    return Reply("answered", _without_key(text), finish, took, seconds, _without_key(thought))


def _parts(body: bytes) -> tuple[dict[str, Any], dict[str, Any], object]:
    """The message of a completion, the choice that it is of, and the count of tokens, whatever that is.

    It is read here and not by the ``openai`` package, whose objects take a hundred times the bytes of the text.
    """
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        if isinstance(choice["message"], dict):
            return choice["message"], choice, found.get("usage")
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # told below, in the server's words
    raise ValueError(f"no completion, but {_words(body[:FAILURE_BYTES].decode(errors='replace'), 200)!r}")


def failed_reply(outcome: str, words: object, took: Cost, seconds: float) -> Reply:
    """Return the reply of an attempt without an answer. Its ``finish`` is "".

    Example: ``failed_reply("timeout", "nothing within 300 s", Cost(1), 3.0)`` returns ``Reply("timeout", "nothing
    within 300 s", "", Cost(1), 3.0)``.

    Args:
        outcome: e.g. ``timeout``.
        words: its explanation, which becomes the text: cleaned, on one line, of at most 2000 characters.
        took: its cost.
        seconds: time from sending to the outcome.
    """
    return Reply(outcome, _words(str(words), _FAILURE_CHARS), "", took, seconds)


def _words(text: str, limit: int) -> str:
    """A server's words on one line."""
    return _without_key(" ".join(clean_text(text, FAILURE_BYTES).split()))[:limit]


def _without_key(text: str) -> str:
    """Some servers repeat the key that they refuse: it is not kept."""
    key = api_key()
    return text.replace(key, "[OPENAI_API_KEY]") if len(key) >= _LEAST_KEY else text


def _word(found: object, limit: int) -> str:
    """A text that a server may leave out; empty if it is no text."""
    return clean_text(found, limit) if isinstance(found, str) else ""


def api_key() -> str:
    """Return the environment's ``OPENAI_API_KEY`` without blanks around it; empty if it is not set."""
    return (os.environ.get("OPENAI_API_KEY") or "").strip()


def _took(usage: object, most: Cost, price: Price, answer_bytes: int) -> Cost:
    """Return the server's count of tokens, raised to the least that the sent and received text can have cost.

    Return ``most`` if the count is missing, no integer, negative or too large, or counts no prompt.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt, answer = counts.get("prompt_tokens"), counts.get("completion_tokens") or 0
    if type(prompt) is not int or type(answer) is not int or not (0 < prompt <= _MOST_TOKENS >= answer >= 0):
        return most
    least = at_least(most, answer_bytes)
    prompt, answer = max(prompt, least.prompt_tokens), max(answer, least.answer_tokens)
    return Cost(1, prompt, answer, price.usd(prompt, answer))
