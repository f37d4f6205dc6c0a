"""The run's record beside its evaluations: questions, attempts, outcomes of answers, and the archive. Append-only.

The tables lie in the run's store (:mod:`outblas.records.store`), and the driver alone writes them. Every write is a
transaction with ``synchronous=FULL``, so it survives a kill and a power cut once its method has returned.
Text is cleaned when it is written and when it is read, so no text can end a run or its resumption. A question is
written before it is sent, and an answer before it is read. A killed run thus repeats no answered question.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.errors import RecordError
from outblas.records.provenance import utc_now
from outblas.records.store import transaction
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.budget import Cost, Message
from outblas_lab.llm.reply import Reply

_SCHEMA = """
CREATE TABLE IF NOT EXISTS questions (
    id INTEGER PRIMARY KEY, chain INTEGER NOT NULL, turn INTEGER NOT NULL, problem TEXT NOT NULL,
    island INTEGER NOT NULL, model TEXT NOT NULL, purpose TEXT NOT NULL, parents TEXT NOT NULL, messages TEXT NOT NULL,
    at TEXT NOT NULL, UNIQUE (chain, turn)
);
CREATE TABLE IF NOT EXISTS sends (
    id INTEGER PRIMARY KEY, question INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, answer_tokens INTEGER NOT NULL,
    usd REAL NOT NULL, at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_question ON sends (question);
CREATE TABLE IF NOT EXISTS replies (
    send INTEGER PRIMARY KEY, outcome TEXT NOT NULL, text TEXT NOT NULL, finish TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, answer_tokens INTEGER NOT NULL, usd REAL NOT NULL, seconds REAL NOT NULL,
    reasoning TEXT NOT NULL, at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS outcomes (
    id INTEGER PRIMARY KEY, question INTEGER NOT NULL UNIQUE, kind TEXT NOT NULL, answer TEXT NOT NULL,
    name TEXT NOT NULL, us REAL, ratio REAL, gain REAL NOT NULL, words TEXT NOT NULL, at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS archive (
    id INTEGER PRIMARY KEY, problem TEXT NOT NULL, island INTEGER NOT NULL, name TEXT NOT NULL, candidate TEXT NOT NULL,
    score REAL NOT NULL, us REAL NOT NULL, question INTEGER NOT NULL, origin TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class Question:
    """A turn of a chain. A chain is a conversation about one problem that begins with turn 0.

    Attributes:
        id: number of the question, unique in the run, from 1.
        purpose: ``new``, or the kind of the outcome that the turn follows.
        parents: names of the kernels in the chain's first prompt.
        messages: the whole conversation up to this question, without its answer.
        at: time of the record, UTC in ISO 8601 with milliseconds, such as ``2026-11-23T15:42:42.605+00:00``.
    """

    id: int
    chain: int
    turn: int
    problem: str
    island: int
    model: str
    purpose: str
    parents: tuple[str, ...]
    messages: tuple[Message, ...]
    at: str


@dataclass(frozen=True)
class AnswerOutcome:
    """The outcome of an answer.

    Attributes:
        kind: kind of outcome, a key of :data:`outblas_lab.llm.feedback.OUTCOME_KINDS`.
        answer: ``code``, ``config``, or empty for an answer without a candidate.
        name: name of the candidate; "" without one.
        us: median time in microseconds of a candidate that was timed; else None.
        ratio: speed-up of a candidate that was timed, above 1 if it is faster than the baselines; else None.
        gain: natural log of the factor by which the problem's best became faster; else 0.
    """

    question: int
    kind: str
    answer: str = ""
    name: str = ""
    us: float | None = None
    ratio: float | None = None
    gain: float = 0.0
    words: str = ""


class EvolveJournal(AbstractContextManager["EvolveJournal"]):
    """The questions, replies, outcomes and archive of one run, in tables of its store. Missing tables are made.

    It is a context manager: ``with`` yields the journal and closes it. ``ask``, ``sent``, ``replied`` and ``settle``
    write, in this order for a question. ``questions``, ``replies``, ``outcomes``, ``entries``, ``spent`` and
    ``transcript`` read.

    Args:
        path: the store's file, which must exist.

    Raises:
        RecordError: the file is missing, or the tables cannot be made, read or written; earlier records are intact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._guard():
            uri = f"{path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)

    def ask(
        self, chain: int, turn: int, problem: str, island: int, model: str, purpose: str, parents: Sequence[str],
        messages: Sequence[Message],
    ) -> Question:  # fmt: skip
        """Record a question before it is sent and return it, with its new number. Its texts are cleaned.

        The arguments are the fields of :class:`Question`. Example: ``ask(1, 0, problem.key, 0, "gpt", "new", [],
        [{"role": "user", "content": "hi"}])`` returns a Question whose ``id`` is 1 in a new store.

        Raises:
            RecordError: the chain has a question of that turn, or the disk refuses.
        """
        parents, messages = tuple(map(clean_text, parents)), _clean_messages(messages)
        texts = json.dumps(parents), json.dumps(messages)
        row = (chain, turn, problem, island, model, purpose, *texts, utc_now("milliseconds"))
        columns = "chain, turn, problem, island, model, purpose, parents, messages, at"
        with self._guard(), transaction(self._db):
            made = self._db.execute(
                f"INSERT INTO questions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _clean(row)
            )
        return Question(int(made.lastrowid or 0), chain, turn, problem, island, model, purpose, parents,
                        messages, row[-1])  # fmt: skip

    def sent(self, question: int, most: Cost) -> int:
        """Record an attempt before it is sent and return the attempt's number, from 1.

        Args:
            most: the most that the attempt can cost. An attempt counts as one request, whatever ``most.requests`` is.
        """
        row = (question, most.prompt_tokens, most.answer_tokens, most.usd, utc_now("milliseconds"))
        columns = "question, prompt_tokens, answer_tokens, usd, at"
        with self._guard(), transaction(self._db):
            return int(self._db.execute(f"INSERT INTO sends ({columns}) VALUES (?, ?, ?, ?, ?)", row).lastrowid or 0)

    def replied(self, send: int, reply: Reply) -> None:
        """Record the reply to an attempt. An attempt has one reply.

        Raises:
            RecordError: the attempt has a reply, or the disk refuses.
        """
        took = reply.took
        row = (send, reply.outcome, reply.text, reply.finish, took.prompt_tokens, took.answer_tokens, took.usd,
               reply.seconds, reply.reasoning, utc_now("milliseconds"))  # fmt: skip
        with self._guard(), transaction(self._db):
            self._db.execute("INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _clean(row))

    def settle(self, outcome: AnswerOutcome, entries: Sequence[Entry] = ()) -> None:
        """Record the outcome of an answer and the archive's additions in one transaction.

        Args:
            entries: entries that the archive has gained by it.

        Raises:
            RecordError: the question has an outcome, or the disk refuses. Nothing is recorded then.
        """
        o = outcome
        with self._guard(), transaction(self._db):
            self._db.execute(
                "INSERT INTO outcomes (question, kind, answer, name, us, ratio, gain, words, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                _clean((o.question, o.kind, o.answer, o.name, o.us, o.ratio, o.gain, o.words, utc_now("milliseconds"))),
            )
            self._db.executemany(
                "INSERT INTO archive (problem, island, name, candidate, score, us, question, origin) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (e.problem, e.island, e.name, json.dumps(e.candidate), e.score, e.us, e.question, e.origin)
                    for e in entries
                ],
            )

    def questions(self) -> Iterator[Question]:
        """Yield all questions, in the order in which they were asked."""
        for number, chain, turn, problem, island, model, purpose, *texts, at in self._rows(
            "SELECT id, chain, turn, problem, island, model, purpose, parents, messages, at FROM questions ORDER BY id"
        ):
            parents, messages = (json.loads(text) for text in texts)
            parents, messages = tuple(map(clean_text, parents)), _clean_messages(messages)
            yield Question(number, chain, turn, problem, island, model, purpose, parents, messages, at)

    def replies(self, question: int | None = None) -> Iterator[tuple[int, Reply]]:
        """Yield (number of the question, reply) of every attempt, in the order of sending.

        An attempt without a recorded reply has the outcome ``lost`` and costs the most that it can have cost.

        Args:
            question: yield only the attempts at this question; None: all.
        """
        query = f"""SELECT s.question, s.prompt_tokens, s.answer_tokens, s.usd, r.outcome, r.text, r.finish,
                           r.prompt_tokens, r.answer_tokens, r.usd, r.seconds, r.reasoning
                    FROM sends s LEFT JOIN replies r ON r.send = s.id
                    {"" if question is None else "WHERE s.question = ?"} ORDER BY s.id"""
        arguments = () if question is None else (question,)
        for number, *most, outcome, text, finish, prompt, answer, usd, seconds, thought in self._rows(query, arguments):
            if outcome is None:
                yield number, Reply("lost", "", "", Cost(1, *most), 0.0)
            else:
                yield number, Reply(outcome, text, finish, Cost(1, prompt, answer, usd), seconds, thought)

    def outcomes(self) -> dict[int, AnswerOutcome]:
        """Return number of a question -> its outcome, in the order of the recording; open questions are missing."""
        columns = "question, kind, answer, name, us, ratio, gain, words"
        return {row[0]: AnswerOutcome(*row) for row in self._rows(f"SELECT {columns} FROM outcomes ORDER BY id")}

    def entries(self) -> list[Entry]:
        """Return the archive's entries, in the order of their insertion."""
        columns = "problem, island, name, candidate, score, us, question, origin"
        return [
            Entry(problem, island, name, json.loads(candidate), *figures)
            for problem, island, name, candidate, *figures in self._rows(f"SELECT {columns} FROM archive ORDER BY id")
        ]

    def spent(self) -> Cost:
        """Return the cost of all attempts so far; one without a recorded reply counts at the most it can cost."""
        total = Cost()
        for _, reply in self.replies():
            total += reply.took
        return total

    def transcript(self) -> Iterator[dict[str, Any]]:
        """Yield every question as a dictionary, in order.

        Its keys are the fields of :class:`Question`, ``attempts`` (a list of replies as dictionaries) and ``outcome``
        (a dictionary or None).
        """
        outcomes = self.outcomes()
        for q in self.questions():
            yield {
                **vars(q),
                "attempts": [{**vars(r), "took": vars(r.took)} for _, r in self.replies(q.id)],
                "outcome": vars(outcomes[q.id]) if q.id in outcomes else None,
            }

    def close(self) -> None:
        with self._guard():
            self._db.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, query: str, arguments: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Row by row: prompts and answers of a long run are more than one wants in memory."""
        with self._guard():
            yield from map(_clean, self._db.execute(query, arguments))

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            wrong = f"run record {self.path} cannot be read or written ({error})"
            do = "free some space and rerun the command; earlier records are intact"
            expected = "a complete, writable store, free disk space, and no other process using the store"
            raise RecordError(wrong, expected, do) from error


def _clean(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(clean_text(value) if isinstance(value, str) else value for value in row)


def _clean_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple({role: clean_text(text) for role, text in one.items()} for one in messages)
