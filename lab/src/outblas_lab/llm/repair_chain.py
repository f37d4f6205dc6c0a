"""A chain: a conversation with a model about one problem, from the first prompt through its repairs.

The next step follows from the chain's record alone, so a killed chain continues at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from outblas_lab.llm.budget import Message
from outblas_lab.llm.evolve_journal import AnswerOutcome, Question
from outblas_lab.llm.prompt import FOLLOW_UPS
from outblas_lab.llm.reply import Reply

#: Purpose of a question that asks for an improvement of a proven kernel.
IMPROVE = "proven"


@dataclass(frozen=True)
class TurnLimits:
    """Limits on the turns of a conversation.

    Attributes:
        turns: most turns, the first question included.
        repairs: most repairs in a row; a proven kernel begins a new count. None: no limit of its own.
        improvements: most improvements of proven kernels; None: no limit of its own.
    """

    turns: int
    repairs: int | None = None
    improvements: int | None = None

    def allow(self, purposes: Sequence[str], outcome: str) -> bool:
        """Return whether a turn may follow.

        Args:
            purposes: purposes of the questions so far, in order: ``new``, or the kind of the outcome that each follows.
        """
        if len(purposes) >= self.turns:
            return False
        if outcome == IMPROVE:
            return self.improvements is None or purposes.count(IMPROVE) < self.improvements
        in_a_row = len(list(takewhile(lambda purpose: purpose not in ("new", IMPROVE), reversed(purposes))))
        return self.repairs is None or in_a_row < self.repairs


@dataclass
class Chain:
    """A conversation so far.

    ``last`` is its last question. ``unfinished(limits)`` is True if its last question has no outcome or wants a
    follow-up.

    Attributes:
        outcomes: number of a question -> outcome, of those that have one.
        replies: number of a question -> answered reply, of those that have one.
    """

    number: int
    questions: list[Question] = field(default_factory=list)
    outcomes: dict[int, AnswerOutcome] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)

    @property
    def last(self) -> Question:
        return self.questions[-1]

    def open_question(self) -> Question | None:
        """Return the last question if it has no outcome yet; None otherwise, or without questions."""
        return self.last if self.questions and self.last.id not in self.outcomes else None

    def unfinished(self, limits: TurnLimits) -> bool:
        """Return whether the last question is open, or its outcome asks for another turn and turns are left.

        Every kind of outcome asks for one except ``compiled`` and ``unanswered``. Return False without questions.
        """
        if not self.questions or self.open_question() is not None:
            return bool(self.questions)
        kind = self.outcomes[self.last.id].kind
        return kind in FOLLOW_UPS and limits.allow([q.purpose for q in self.questions], kind)

    def drop_texts(self, limits: TurnLimits) -> None:
        """Drop messages and replies of a finished chain, in place, to free memory. An unfinished chain is unchanged.

        The questions stay, with ``messages`` of ``()``.
        """
        if not self.unfinished(limits):
            self.questions = [replace(q, messages=()) for q in self.questions]
            self.replies.clear()

    def conversation_with(self, text: str, short: bool = False) -> list[Message]:
        """Return the last question's messages (``short``: the first's), its answer, and ``text`` as a new user message.

        An empty or missing answer is left out, because servers refuse messages without content. The chain is not
        changed. Example: ``chain.conversation_with("next")`` ends with ``{"role": "assistant", "content": "hey"},
        {"role": "user", "content": "next"}``.
        """
        reply = self.replies.get(self.last.id)
        answer: list[Message] = [] if reply is None or not reply.text.strip() else [
            {"role": "assistant", "content": reply.text}
        ]  # fmt: skip
        return [*self.questions[0 if short else -1].messages, *answer, {"role": "user", "content": text}]


def chains_of(
    questions: Iterable[Question],
    outcomes: Mapping[int, AnswerOutcome],
    replies: Iterable[tuple[int, Reply]],
    limits: TurnLimits,
) -> dict[int, Chain]:
    """Return number -> chain of a record, in the order of first questions. Finished chains have no texts.

    Args:
        replies: (number of a question, reply) of all attempts. Only answered ones of unfinished chains are kept.
    """
    chains: dict[int, Chain] = {}
    of_question: dict[int, Chain] = {}
    for question in questions:
        chain = chains.setdefault(question.chain, Chain(question.chain))
        chain.questions.append(question)
        of_question[question.id] = chain
        if question.id in outcomes:
            chain.outcomes[question.id] = outcomes[question.id]
        chain.drop_texts(limits)  # a later question brings the whole conversation again
    for number, reply in replies:
        if reply.answered and of_question[number].unfinished(limits):
            of_question[number].replies[number] = reply
    return chains
