"""A server's reply to one attempt, made safe to keep: its text, its reason to stop, and its cost."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from outblas.core.clean_text import clean_text
from outblas_lab.llm.bounded_http import FAILURE_BYTES
from outblas_lab.llm.budget import Cost, Price, at_least

#: Longest answer, and longest thoughts, that are kept, characters; the largest kernel has a quarter of that.
ANSWER_CHARS = 1 << 20
#: Of the words of a server that has no answer, and of why a model stopped.
_FAILURE_CHARS, _FINISH_CHARS = 2000, 40
#: Replacements for C's white space among the control characters.
_SPACES = str.maketrans({"\r": "\n", "\v": " ", "\f": " "})
#: More tokens than any server counts; what says more is no count.
_MOST_TOKENS = 10**9
#: Reasons to stop that say that the server gave up, not the model. The answer is a piece at best.
_GAVE_UP = frozenset({"error", "abort", "insufficient_system_resource"})
#: Gemini's own names of a filter that stopped an answer.
_FILTERS = ("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii")
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

    Thoughts before ``</think>`` are no part of the text: servers without a parser of thoughts leave them there.

    Args:
        most: the most that the request can have cost. It is charged if the server's count of tokens is missing, no
            integer, negative or above 10**9, or if it counts no prompt. An answer counts as the total less the prompt,
            if that is more: some servers count thoughts in the total alone.

    Returns:
        A reply with the outcome ``answered``, even if its text is "". Its ``finish`` is ``refusal`` if the server marks
        one, and ``content_filter`` for any name of a filter. Too small a count of tokens is raised to the least that
        the texts can have cost (:func:`outblas_lab.llm.budget.at_least`).

        Gateways send an error in the body of a success. Its status gives the outcome, ``http <status>``. The outcome is
        ``unreadable`` if the server gave up in the middle of the answer.

    Raises:
        ValueError: the body has no answer.
    """
    try:  # not by the ``openai`` package, whose objects take a hundred times the bytes of the text
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if (error := _error_status(found)) is not None:
        took = Cost(1) if error < 500 and error != 408 else _took(found.get("usage"), most, price, 0)
        return failed_reply(f"http {error}", _words(json.dumps(found["error"]), _FAILURE_CHARS), took, seconds)
    message, choice, usage = _parts(found, body)
    refusal = message.get("refusal")
    text, thought = _texts(message.get("content") or refusal or "")
    finish = "refusal" if refusal else _finish(choice)
    # No part of the interface, but what servers of reasoning models call it.
    thought = _word(message.get("reasoning_content") or message.get("reasoning") or thought, ANSWER_CHARS)
    if not thought:
        text, thought = _without_thoughts(text)
    if finish in _GAVE_UP:
        took = _took(usage, most, price, len(text.encode(errors="replace")))
        words = f"the server gave up ({finish}): {json.dumps(choice.get('error'))}"
        return failed_reply("unreadable", words, took, seconds)
    if len(text) > ANSWER_CHARS:
        finish = "length"
    # Compilers and readers of an answer take these for the end of a line, and for blanks.
    text = clean_text(text.replace("\r\n", "\n").translate(_SPACES), ANSWER_CHARS)
    took = _took(usage, most, price, len(text.encode()) + len(thought.encode()))
    return Reply("answered", _without_key(text), finish, took, seconds, _without_key(thought))


def _error_status(found: Any) -> int | None:
    """The status of an error that stands in place of the choices; None if there is no such error."""
    if not isinstance(found, dict) or found.get("choices") or not isinstance(found.get("error"), dict):
        return None
    code = found["error"].get("code")
    return code if type(code) is int and 400 <= code < 600 else None


def _parts(found: Any, body: bytes) -> tuple[dict[str, Any], dict[str, Any], object]:
    """The message of a completion, the choice that it is of, and the count of tokens, whatever that is.

    A filter may leave a reason to stop and no message; the message is empty then.
    """
    try:
        choice = found["choices"][0]
        message = choice.get("message")
        if message is None and isinstance(choice.get("finish_reason"), str):
            message = {}
        if isinstance(message, dict):
            return message, choice, found.get("usage")
    except (AttributeError, LookupError, TypeError):
        pass  # told below, in the server's words
    raise ValueError(f"not a completion: {_words(body[:FAILURE_BYTES].decode(errors='replace'), 200)!r}")


def _finish(choice: dict[str, Any]) -> str:
    """The reason to stop, with one name for all filters."""
    finish = _word(choice.get("finish_reason"), _FINISH_CHARS)
    if isinstance(choice.get("error"), dict):
        return "error"
    return "content_filter" if finish.lower().startswith(_FILTERS) else finish


def _texts(content: object) -> tuple[str, str]:
    """The text and the thoughts of a content, which some servers send as a list of parts."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise ValueError(f"the answer has type {type(content).__name__}")
    texts, thoughts = [], []
    for part in content:
        if isinstance(part, dict):
            texts.append(_word(part.get("text"), ANSWER_CHARS + 1))
            thoughts.append(_thinking(part.get("thinking")))
    if not any(isinstance(part, dict) and ("text" in part or "thinking" in part) for part in content):
        raise ValueError("the answer is a list without text")
    return "".join(texts), "".join(thoughts)


def _thinking(found: object) -> str:
    """The thoughts of a part of a content: a text, or a list of parts with texts."""
    if isinstance(found, list):
        return "".join(_word(one.get("text"), ANSWER_CHARS) for one in found if isinstance(one, dict))
    return _word(found, ANSWER_CHARS)


def _without_thoughts(text: str) -> tuple[str, str]:
    """The text after the thoughts that a model marks, and the thoughts. Their first mark is often in the prompt."""
    thought, mark, rest = text.partition("</think>")
    if not mark:
        return ("", _word(text, ANSWER_CHARS)) if text.lstrip().startswith("<think>") else (text, "")
    return rest, _word(thought.strip().removeprefix("<think>"), ANSWER_CHARS)


def failed_reply(outcome: str, words: object, took: Cost, seconds: float) -> Reply:
    """Return the reply of an attempt without an answer. Its ``finish`` is "".

    Args:
        words: its explanation, which becomes the text: cleaned, on one line, of at most 2000 characters.
    """
    return Reply(outcome, _words(str(words), _FAILURE_CHARS), "", took, seconds)


def _words(text: str, limit: int) -> str:
    """A server's words on one line."""
    return _without_key(" ".join(clean_text(text, FAILURE_BYTES).split()))[:limit]


def _without_key(text: str) -> str:
    """Some servers repeat the key that they refuse: it is not kept, however JSON, an address or a page spells it."""
    key = api_key()
    if len(key) < _LEAST_KEY:
        return text
    spelled = json.dumps(key)[1:-1]
    for form in (key, spelled, spelled.replace("/", "\\/"), quote(key), quote(key, safe=""), html.escape(key)):
        text = text.replace(form, "[OPENAI_API_KEY]")
    return text


def _word(found: object, limit: int) -> str:
    """A text that a server may leave out; empty if it is no text."""
    return clean_text(found, limit) if isinstance(found, str) else ""


def api_key() -> str:
    """Return the environment's ``OPENAI_API_KEY`` without blanks around it; empty if it is not set."""
    return (os.environ.get("OPENAI_API_KEY") or "").strip()


def _took(usage: object, most: Cost, price: Price, answer_bytes: int) -> Cost:
    """Return the server's count of tokens, raised to the least that the sent and received text can have cost.

    Thoughts that only the total counts belong to the answer. Return ``most`` if the count is missing, no integer,
    negative or too large, or counts no prompt.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt, answer = counts.get("prompt_tokens"), counts.get("completion_tokens") or 0
    total = counts.get("total_tokens")
    if type(prompt) is not int or type(answer) is not int or not (0 < prompt <= _MOST_TOKENS >= answer >= 0):
        return most
    if type(total) is int and total <= _MOST_TOKENS:
        answer = max(answer, total - prompt)
    least = at_least(most, answer_bytes)
    prompt, answer = max(prompt, least.prompt_tokens), max(answer, least.answer_tokens)
    return Cost(1, prompt, answer, price.usd(prompt, answer))
