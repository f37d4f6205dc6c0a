"""Languages of answers: prompts for a model, and the way from an answer to a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

from outblas.core.config import Candidate
from outblas.core.problem import Problem
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.train.rewards import RefusedAnswer

if TYPE_CHECKING:
    from outblas_lab.llm.train.answer_judge import JudgedAnswer

Read = Union[Candidate, RefusedAnswer]
#: A prompt or an answer, as trl takes it: text, or the messages of a conversation.
Text = Union[str, list[dict[str, str]]]


class Language(Protocol):
    """The prompts and answers of one language.

    ``prompt(problem)`` makes a prompt, ``read(problem, answer)`` reads an answer, and ``write(problem, candidate)``
    makes one. :func:`outblas_lab.llm.train.languages.language_of` returns a language by its name.
    """

    @property
    def name(self) -> str:
        """Name of the language for ``--language``."""

    @property
    def max_tokens(self) -> int:
        """Longest answer, tokens, unless the run says otherwise."""

    def prompt(self, problem: Problem, pair: Sequence[Entry] = ()) -> Text:
        """Return the prompt for a problem: text, or messages.

        With a pair it asks first for the reason of the difference in speed, then for a better kernel.

        Args:
            pair: two proven kernels of the problem that the language can express, the slower first; or none.
        """

    def follow_up(self, problem: Problem | SmallTask, prompt: Text, answer: str, verdict: JudgedAnswer) -> Text:
        """Return the prompt of the next turn: the earlier prompt, the answer, its outcome, and a request for another.

        Args:
            verdict: its verdict, of a kind in :data:`outblas_lab.llm.prompt.FOLLOW_UPS`.
        """

    def task_prompt(self, task: SmallTask) -> Text:
        """Return the prompt for a small general kernel: text, or messages.

        Raises:
            UsageError: the language has no words for such kernels.
        """

    def read(self, problem: Problem, answer: str) -> Read:
        """Return the candidate of an answer, or the reason for its lack. No text of a model raises an error.

        Returns:
            The candidate, or a :class:`outblas_lab.llm.train.rewards.RefusedAnswer`.
        """

    def write(self, problem: Problem, candidate: Candidate) -> str | None:
        """Return an answer that reads as the candidate, for training; None if the language cannot express it.

        Example: ``"bm=64 bn=64 stages=4 consumers=1"`` in the language ``knobs``.
        """

    def generation(self, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
        """Return options of transformers' GenerationConfig that keep answers inside the language; mostly empty.

        Args:
            vocabulary: number of ids that the model can emit: rows of its embedding, which may exceed the tokenizer's.
        """
