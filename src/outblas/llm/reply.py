"""What a server says to one attempt, made safe to keep: its text, why it stopped, what it took."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from outblas.llm.budget import Cost, Price

#: Longest answer, and longest thoughts, that are kept, characters; the largest kernel has a quarter of that.
ANSWER_CHARS = 1 << 20
#: Of the words of a server that has no answer.
_FAILURE_CHARS = 2000
#: More tokens than any server counts; what says more is no count.
_MOST_TOKENS = 10**9
#: A key of fewer characters is none (a server of one's own takes any word), and may be part of other words.
_LEAST_KEY = 8


@dataclass(frozen=True)
class Reply:
    """What came of one attempt.

    Attributes:
        outcome: ``answered``; ``http <status>``, ``timeout``, ``dropped``, ``unreadable``; or, when a record is read
            back, ``lost``: a process was killed before it heard.
        text: the answer, or the server's words on why there is none.
        finish: why the model stopped, as the server says (``stop``, ``length``, ``content_filter``).
        took: what the budget is charged: the server's own count, or the most it can have been.
        seconds: from sending to the outcome. reasoning: what the model thought, where the server tells.
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


def read_completion(found: Any, most: Cost, price: Price, seconds: float) -> Reply:
    """The answer of a completion. One that is too long is cut, as at a limit of tokens.

    Args:
        found: as the ``openai`` package gives it, which checks nothing. most: what it can have taken.

    Raises:
        ValueError: it has no answer.
    """
    if not getattr(found, "choices", None):
        raise ValueError(f"no completion, but {' '.join(str(found).split())[:200]!r}")
    choice = found.choices[0]
    message = choice.message
    refusal = getattr(message, "refusal", None)
    text = message.content or refusal or ""
    if not isinstance(text, str):
        raise ValueError(f"the answer is {type(text).__name__}")
    finish = "refusal" if refusal else str(choice.finish_reason or "")
    if len(text) > ANSWER_CHARS:
        text, finish = text[:ANSWER_CHARS], "length"
    # No part of the interface, but what servers of reasoning models call it.
    thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
    took = _took(getattr(found, "usage", None), most, price)
    return Reply("answered", _whole(text), finish, took, seconds, _whole(str(thought)[:ANSWER_CHARS]))


def failed_reply(outcome: str, words: object, took: Cost, seconds: float) -> Reply:
    """An attempt without an answer. Some servers repeat the key that they refuse: it is not kept."""
    text = " ".join(str(words).split())
    key = api_key()
    if len(key) >= _LEAST_KEY:
        text = text.replace(key, "[OPENAI_API_KEY]")
    return Reply(outcome, _whole(text[:_FAILURE_CHARS]), "", took, seconds)


def api_key() -> str:
    """``OPENAI_API_KEY``, empty where it is not set; without the end of line that a file leaves, which no header may
    have."""
    return (os.environ.get("OPENAI_API_KEY") or "").strip()


def _took(usage: Any, most: Cost, price: Price) -> Cost:
    """What the server has counted; the most that it can have been where that is no count."""
    prompt, answer = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None) or 0
    if type(prompt) is not int or type(answer) is not int or not (0 < prompt <= _MOST_TOKENS >= answer >= 0):
        return most
    return Cost(1, prompt, answer, price.usd(prompt, answer))


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold and no file can."""
    return text.encode("utf-8", "replace").decode("utf-8")
