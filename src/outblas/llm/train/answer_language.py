"""What a language of answers is: what a model is asked in it, and how its answer becomes a candidate."""

from __future__ import annotations

from typing import Any, Protocol, Union

from outblas.core.config import Candidate
from outblas.core.problem import Problem
from outblas.llm.train.rewards import RefusedAnswer

Read = Union[Candidate, RefusedAnswer]
#: A prompt or an answer, as trl takes it: text, or the messages of a conversation.
Text = Union[str, list[dict[str, str]]]


class Language(Protocol):
    """What a model reads and writes."""

    @property
    def name(self) -> str:
        """As ``--language`` names it."""

    @property
    def max_tokens(self) -> int:
        """Longest answer, tokens, unless the run says otherwise."""

    def prompt(self, problem: Problem) -> Text:
        """What the model is asked: text, or messages."""

    def read(self, problem: Problem, answer: str) -> Read:
        """The candidate of an answer, or why there is none; never raises for what a model wrote."""

    def write(self, problem: Problem, candidate: Candidate) -> str | None:
        """An answer that reads as the candidate, to learn from; None where the language cannot say it."""

    def generation(self, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
        """Options of transformers' GenerationConfig that keep answers inside the language (none, mostly)."""
