"""Budget of a run on a server, and its spending: requests, tokens, US dollars, seconds.

A request is sent only if the budget holds in the worst case. That is one token per byte of the prompt, and the largest
allowed answer. The true cost replaces this estimate once the answer has arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outblas.core.errors import OutblasError, UsageError

#: Tokens that servers add around a message (role, delimiters), at most.
TOKENS_PER_MESSAGE = 16
#: Bytes of a token at most, on the average of a text: no tokeniser needs fewer tokens than that.
BYTES_PER_TOKEN = 16
_UNITS = {"request": "requests", "token": "tokens", "usd": "usd", "s": "seconds", "second": "seconds"}
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}

#: One message of a conversation: ``role`` and ``content``.
Message = Mapping[str, str]


class BudgetSpent(OutblasError, RuntimeError):
    """An error: the next request could pass the budget."""


@dataclass(frozen=True)
class Price:
    """The price of a model.

    Attributes:
        prompt: US dollars per million tokens of prompts.
        answer: US dollars per million tokens of answers.
    """

    prompt: float = 0.0
    answer: float = 0.0

    def usd(self, prompt_tokens: int, answer_tokens: int) -> float:
        return (prompt_tokens * self.prompt + answer_tokens * self.answer) / 1e6


@dataclass(frozen=True)
class Cost:
    """The cost of requests, or its upper bound. ``+`` and ``-`` add and subtract costs field by field."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Cost)))


@dataclass(frozen=True)
class Budget:
    """Limits of a run; None: no limit.

    Seconds count per session, so that a resumed run has as long again. All other limits cover the whole run.

    Attributes:
        tokens: tokens of prompts and answers together.
    """

    requests: int | None = None
    tokens: int | None = None
    usd: float | None = None
    seconds: float | None = None

    def why_not(self, spent: Cost, seconds: float = 0.0) -> str | None:
        """Return the first limit that is passed, or None if the budget holds.

        The text is one of ``50 requests``, ``2000000 tokens``, ``3 USD`` and ``600 s``, in this order of checks. It
        names the limit, not the cost. Requests, tokens and dollars may equal their limit. Seconds must be below theirs.
        """
        if self.requests is not None and spent.requests > self.requests:
            return f"{self.requests} requests"
        if self.tokens is not None and spent.tokens > self.tokens:
            return f"{self.tokens} tokens"
        if self.usd is not None and spent.usd > self.usd * (1 + 1e-9):
            return f"{self.usd:g} USD"
        if self.seconds is not None and seconds >= self.seconds:
            return f"{self.seconds:g} s"
        return None

    def share(self, spent: Cost, seconds: float) -> float:
        """Return the largest part of any limit that is spent, from 0 to 1; 0 without limits. More than 1 counts as 1.

        Example: ``Budget(requests=5).share(Cost(2), 9.0)`` returns 0.4. A limit of 0 is ignored.
        """
        pairs = ((spent.requests, self.requests), (spent.tokens, self.tokens), (spent.usd, self.usd),
                 (seconds, self.seconds))  # fmt: skip
        return min(1.0, max((have / most for have, most in pairs if most), default=0.0))


class SpendingAccount:
    """Costs spent, and costs reserved for requests under way.

    Call ``reserve(most)`` before a request and ``settle(most, took)`` after it. Example:
    ``SpendingAccount(Budget(requests=5))`` has ``spent`` and ``reserved`` of ``Cost()``.

    Attributes:
        spent: cost of all settled requests, with earlier sessions'.
        reserved: cost set aside for requests under way.
        before: cost of earlier sessions.
    """

    def __init__(self, budget: Budget, spent: Cost | None = None) -> None:
        self.budget, self.spent, self.reserved = budget, spent or Cost(), Cost()
        #: Spent before, by earlier sessions of a run.
        self.before = self.spent

    def reserve(self, most: Cost, seconds: float = 0.0) -> None:
        """Set the largest cost of a request aside: add it to ``reserved``. Settle each reservation once.

        Raises:
            BudgetSpent: spent and reserved costs with ``most`` exceed a limit, or the seconds have reached theirs.
                Nothing is reserved then.
        """
        passed = self.budget.why_not(self.spent + self.reserved + most, seconds)
        if passed is not None:
            raise BudgetSpent(f"the next request could exceed the budget of {passed}", "enough remaining budget",
                              "rerun the command with a larger --budget; it resumes")  # fmt: skip
        self.reserved += most

    def settle(self, most: Cost, took: Cost) -> None:
        """Replace the reserved cost of a request by its true cost, which ``spent`` gains.

        Args:
            took: the true cost, which may be ``Cost()``. No limit is checked.
        """
        self.reserved -= most
        self.spent += took


def at_most(messages: Sequence[Message], answer_tokens: int, price: Price) -> Cost:
    """Return the largest possible cost of a request: no tokeniser makes more tokens than bytes.

    ``prompt_tokens`` is the number of UTF-8 bytes of all contents, plus 16 for each message. Example: one message
    ``hello``, 100 and ``Price(1.0, 2.0)`` give ``Cost(1, 21, 100, 0.000221)``.

    Args:
        answer_tokens: most tokens of the answer.
    """
    prompt = sum(len(m["content"].encode(errors="replace")) + TOKENS_PER_MESSAGE for m in messages)
    return Cost(1, prompt, answer_tokens, price.usd(prompt, answer_tokens))


def at_least(most: Cost, answer_bytes: int) -> Cost:
    """Return the least that one request can have taken, whatever its server counts: a token for 16 bytes, rounded down.

    The result's ``usd`` is 0. Example: of ``Cost(1, 160, 100)`` and 3200 bytes it is ``Cost(1, 10, 100)``.

    Args:
        most: the most that it can have taken, of :func:`at_most`. One 16th of its ``prompt_tokens`` counts, and its
            ``answer_tokens`` limit those of the result.
        answer_bytes: bytes of the answer and of the thoughts that came.
    """
    answer = min(answer_bytes // BYTES_PER_TOKEN, most.answer_tokens)
    return Cost(1, most.prompt_tokens // BYTES_PER_TOKEN, answer)


def parse_budget(text: str) -> Budget:
    """Return the budget of a text: one limit, or several separated by commas.

    A limit is a number above 0, then ``requests``, ``tokens``, ``USD`` or ``s`` (``seconds``), in upper or lower case.
    The singular is allowed, and so is no space. ``k`` and ``M`` after a number mean thousand and million. Limits that
    are not named are None.

    Example: ``2M tokens, 3 USD`` is ``Budget(tokens=2000000, usd=3.0)``.

    Raises:
        UsageError: anything else, an empty text, a limit of 0, a fraction of a request or token, or a limit given
            twice.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d+)?)\s*([kKmM]?)\s*(requests?|tokens?|usd|s|seconds?)\s*", part, re.I)
        if match is None or not float(match[1]):
            raise UsageError(f"--budget {part.strip()!r} is invalid", "an amount in requests, tokens, USD or s",
                             "pass e.g. --budget '50 requests,3 USD'")  # fmt: skip
        unit = match[3].lower()
        name = _UNITS[unit if unit in _UNITS else unit.rstrip("s")]
        value = float(match[1]) * _FACTORS[match[2].lower()]
        if name in found:
            raise UsageError(f"--budget names {name} twice", "each unit once", "remove one of the limits")
        if name in ("requests", "tokens"):
            if value != int(value):
                raise UsageError(f"--budget {part.strip()!r} is a fraction", f"a whole number of {name}", "round it")
            value = int(value)
        found[name] = value
    return Budget(**found)
