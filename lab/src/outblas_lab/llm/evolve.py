"""The loop of `outblas evolve`: ask for kernels, evaluate them, archive the proven ones, until the budget is spent.

Several conversations run at once. A resumed run reads the record. Chains continue from their last turn, and a received
answer is evaluated before a new question. Draws depend on the seed, the archive and the number of the chain alone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.answer import CODE, CONFIG, read_answer
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.async_evaluator import AsyncEvaluator
from outblas_lab.llm.budget import BudgetSpent, Message
from outblas_lab.llm.client import Client, RequestRejected, ServerError, Unanswered
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal, Question
from outblas_lab.llm.feedback import feedback_text, kernel_facts, kind_of, score_of
from outblas_lab.llm.known_counters import KnownCounters
from outblas_lab.llm.models import Model
from outblas_lab.llm.near_problems import NearProblems
from outblas_lab.llm.prompt import Asked, first_prompt, follow_up, skeleton, tokens_of
from outblas_lab.llm.repair_chain import Chain, TurnLimits, chains_of
from outblas_lab.llm.reply import Reply

#: This number of questions in a row without an answer ends the run: the server is gone. So does this number of first
#: questions in a row that the server refuses for one model.
MAX_UNANSWERED_IN_A_ROW = 3
#: A gap of less than this (log of time / floor) is closed: nothing more is asked.
CLOSED_GAP = math.log(1.02)


@dataclass(frozen=True)
class EvolveSettings:
    """Settings of a search, apart from its problems and its server.

    Attributes:
        seed: seed of the archive's draws, and of the draw of models with different weights.
        turns: most turns of a conversation, with the first question.
        repairs: most repairs in a row in a conversation; None: as many as ``turns`` allows.
        improvements: most improvements of proven kernels in a conversation; None: as many as ``turns`` allows.
        nearest: most kernels of near problems, and most lessons, in a first prompt; 0: none.
        prompt_tokens: most tokens of a first prompt, as estimated; None: no limit. With a limit, a follow-up repeats
            the first prompt and adds the last answer alone.
    """

    shape: ArchiveShape = ArchiveShape()
    seed: int = 0
    turns: int = 4
    parallel: int = 4
    kinds: tuple[str, ...] = (CODE, CONFIG)
    max_tokens: int = 16384
    repairs: int | None = None
    improvements: int | None = None
    nearest: int = 3
    prompt_tokens: int | None = None

    @property
    def limits(self) -> TurnLimits:
        return TurnLimits(self.turns, self.repairs, self.improvements)


@dataclass(frozen=True)
class ProblemProgress:
    """Progress on a problem, for a watcher.

    Attributes:
        floor_us: least plausible time, microseconds.
        baseline_us: time of the fastest baseline, microseconds; None if none was timed, or before the run.
        best_us: median time of the best archived kernel, microseconds; None without one.
        best_ratio: its speed-up, above 1 if it is faster than the baselines; None without one.
        chains: number of conversations begun, earlier sessions included.
    """

    problem: Problem
    floor_us: float
    baseline_us: float | None
    best_us: float | None
    best_ratio: float | None
    chains: int


class Evolution:
    """A run of the loop, from its record to the end of its budget.

    Args:
        store: evaluations of the run, under ``run_id``.
        journal: questions and answers of the run.
        client: client of the server. Its account starts at ``journal.spent()``; its request log is the journal.

    Attributes:
        archive: the archive, from the record's entries and those of this run.
        watch: called with each outcome; by default it does nothing. Set it before :meth:`run`.
        counters: hardware counters that prompts show; by default none is known. Set it before :meth:`run`, too.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        models: Sequence[Model],
        evaluator: Evaluator,
        store: Store,
        run_id: str,
        journal: EvolveJournal,
        client: Client,
        settings: EvolveSettings,
    ) -> None:
        self._problems = {p.key: p for p in problems}
        self._models, self._evaluator, self._journal, self._client = list(models), evaluator, journal, client
        self._store, self._run_id, self._settings, self._gpu = store, run_id, settings, evaluator.gpu
        self.watch: Callable[[AnswerOutcome], None] = lambda outcome: None
        self.counters = KnownCounters()
        self.archive = Archive(settings.shape, settings.seed, journal.entries())
        self._evaluations = {(e.problem.key, config_name(e.config)): e for e in store.evaluations()}
        self._near = NearProblems(self._gpu, settings.nearest)
        self._chains = chains_of(journal.questions(), journal.outcomes(), journal.replies(), settings.limits)
        self._tried = {
            (question.problem, outcome.name): outcome
            for chain in self._chains.values()
            for question in chain.questions
            if (outcome := chain.outcomes.get(question.id)) and outcome.name and outcome.kind != "duplicate"
        }
        if settings.prompt_tokens:  # short prompts show it
            shown = AnswerOutcome(0, "duplicate", CODE, words="it is the kernel that the prompt shows")
            self._tried |= {(k, FreeKernel.parse(skeleton(p)).name): shown for k, p in self._problems.items()}
        self._left = deque(c for c in self._chains.values() if c.unfinished(settings.limits))
        self._baselines: dict[str, dict[str, float]] = {}
        self._stopping = ""
        self._unanswered = 0
        self._refused: Counter[str] = Counter()  # first questions in a row, by model
        self._error: Exception | None = None

    async def run(self) -> str:
        """Ask, judge and record until the budget is spent or every problem is near its floor. Close the client then.

        Call it once: ``reason = asyncio.run(evolution.run())``. After an error, a new Evolution with the same record
        goes on.

        Returns:
            The reason of the end: ``every problem is within 2% of its floor``, or for example ``the next request could
            pass the budget of 50 requests``.

        Raises:
            ServerError: the server refuses, or did not answer three questions in a row. Also if it refused the first
                questions of three conversations in a row with one model, and answered none between them.
            DeviceError: the evaluator cannot work.
            ToolchainMissing: the evaluator needs a package that is not installed.
            RecordError: the disk refuses.
        """
        self._ended = asyncio.Condition()  # told when a question under way has ended
        self._async_evaluator = AsyncEvaluator(self._evaluator, self._record, self._evaluations.values())
        ask = self._evaluator.baselines
        try:
            for key, problem in self._problems.items():
                self._baselines[key] = dict(await self._async_evaluator.call(partial(ask, problem)))
            await asyncio.gather(*(self._work() for _ in range(self._settings.parallel)))
            if self._error is not None:
                raise self._error
            # The caller may ask the evaluator only when its thread has left it.
            await self._async_evaluator.call(lambda: None)
        finally:
            self._async_evaluator.close()
            await self._client.close()
        return self._stopping or "every problem is within 2% of its floor"

    def prompt_tokens(self) -> int:
        """Return an estimate of the tokens of a first prompt: the largest of all problems. Nothing is sent."""
        return max(tokens_of(self._first_prompt(key, 0, 0)[1]) for key in self._problems)

    def problem_progress(self) -> list[ProblemProgress]:
        """Return the progress on every problem, in their order. Baselines are known once :meth:`run` has begun."""
        begun = self._begun()
        return [
            ProblemProgress(p, floor_us(p, self._gpu), min(self._baselines.get(key, {}).values(), default=None),
                     *self._best(key), begun[key])
            for key, p in self._problems.items()
        ]  # fmt: skip

    def outcomes(self) -> Counter[str]:
        """Return a Counter: kind of outcome -> number of outcomes in the whole run, earlier sessions included.

        Kinds without one are missing. Example: ``Counter({"proven": 3, "compile": 1})``.
        """
        return Counter(o.kind for chain in self._chains.values() for o in chain.outcomes.values())

    @property
    def evaluating(self) -> int:
        """Number of candidates under evaluation; 0 before :meth:`run`."""
        return self._async_evaluator.under_way if hasattr(self, "_async_evaluator") else 0

    async def _work(self) -> None:
        """Chains one after the other: those that a killed run left, then new ones. After an error nobody asks anything
        more, but answers that are on their way are waited for: they are paid."""
        while self._error is None:
            chain = self._left.popleft() if self._left else self._begin()
            if chain is None:
                return
            try:
                await self._carry_on(chain)
            except BudgetSpent as spent:
                self._stopping = self._stopping or spent.wrong
            except Unanswered as error:  # its question stays open, for a run that resumes this one
                self._unanswered += 1
                if self._unanswered >= MAX_UNANSWERED_IN_A_ROW:
                    self._error = self._error or ServerError(
                        f"{self._unanswered} requests in a row had no response: {error.wrong}",
                        "a server that responds", f"{error.do}; the run resumes",
                    )  # fmt: skip
            except Exception as error:
                self._error = self._error or error

    def _begin(self) -> Chain | None:
        """Begin a chain and record its first question. Return None if no further question is due."""
        if self._stopping:
            return None
        begun = self._begun()
        gaps = {key: log_gap(self._known_us(key), floor_us(p, self._gpu)) for key, p in self._problems.items()}
        key = next_problem(gaps, begun)
        if key is None:
            return None
        number = 1 + max(self._chains, default=0)
        island = begun[key] % self._settings.shape.islands
        names, messages = self._first_prompt(key, island, number)
        chain = self._chains[number] = Chain(number)
        model = self._model_of(number)
        chain.questions.append(self._journal.ask(number, 0, key, island, model.name, "new", names, messages))
        return chain

    def _first_prompt(self, key: str, island: int, number: int) -> tuple[list[str], list[Message]]:
        """The names of the kernels that the prompt of a new chain shows, and its messages."""
        settings, parents = self._settings, self.archive.draw(key, island, number)
        known = {p.name: self._evaluations[key, p.name] for p in parents}
        words = {name: self.counters.words(evaluation, self._gpu) for name, evaluation in known.items()}
        shown = {name: kernel_facts(evaluation, words[name]) for name, evaluation in known.items()}
        near = self._near.text(self._problems[key], self.archive, settings.kinds)
        asked, baselines = Asked(settings.kinds, tokens=settings.prompt_tokens), self._baselines.get(key, {})
        problem, best = self._problems[key], self._best(key)[0]
        messages = first_prompt(problem, self._gpu, baselines, best, parents, shown, asked, near)
        return [p.name for p in parents], messages

    async def _carry_on(self, chain: Chain) -> None:
        """Ask, read, evaluate, record; as long as another turn follows."""
        while chain.unfinished(self._settings.limits) and self._error is None:
            question = chain.open_question() or self._follow_up(chain)
            if question.id not in chain.replies:
                try:
                    chain.replies[question.id] = await self._ask(question)
                except RequestRejected as error:
                    self._settle(chain, AnswerOutcome(question.id, "unanswered", words=str(error)))
                    # A long conversation may be refused for its length, which says nothing of the next one.
                    self._refused[question.model] += question.turn == 0
                    if self._refused[question.model] >= MAX_UNANSWERED_IN_A_ROW:
                        count = self._refused[question.model]
                        self._error = self._error or ServerError(
                            f"{count} conversations in a row with {question.model!r} failed: {error.wrong}",
                            "a server that accepts the first request", "correct --model, --max-tokens or --temperature",
                        )  # fmt: skip
                    return
                self._unanswered = self._refused[question.model] = 0
            await self._read(chain, question, chain.replies[question.id])

    def _follow_up(self, chain: Chain) -> Question:
        last = chain.last
        outcome = chain.outcomes[last.id]
        text = follow_up(outcome.kind, outcome.words, self._problems[last.problem], self._gpu,
                         self._best(last.problem)[0], self._settings.max_tokens, self._settings.kinds)  # fmt: skip
        messages = chain.conversation_with(text, bool(self._settings.prompt_tokens))
        question = self._journal.ask(chain.number, last.turn + 1, last.problem, last.island, last.model, outcome.kind,
                                    last.parents, messages)  # fmt: skip
        chain.questions.append(question)
        return question

    async def _ask(self, question: Question) -> Reply:
        """The answer; while requests under way hold what is left of the budget, wait for what they really take."""
        model = next(m for m in self._models if m.name == question.model)
        while True:
            try:
                reply = await self._client.ask(question.id, question.messages, model)
            except BudgetSpent:
                async with self._ended:
                    if self._client.account.reserved.requests < 1:
                        self._ended.notify_all()  # callers that wait for this one see it, too
                        raise
                    await self._ended.wait()
            except BaseException:
                async with self._ended:
                    self._ended.notify_all()
                raise
            else:
                async with self._ended:
                    self._ended.notify_all()
                return reply

    async def _read(self, chain: Chain, question: Question, reply: Reply) -> None:
        """Read and evaluate an answer, and record its outcome in the chain and the journal. Return None."""
        problem = self._problems[question.problem]
        read = read_answer(reply.text, reply.finish, problem, self._gpu)
        if read.answer and read.answer not in self._settings.kinds:  # a run for knobs alone runs no foreign code
            words = f"it is {read.answer}, which was not asked for"
            self._settle(chain, AnswerOutcome(question.id, "malformed", read.answer, words=words))
            return
        if read.candidate is None:
            self._settle(chain, AnswerOutcome(question.id, read.kind, read.answer, words=read.words))
            return
        name = config_name(read.candidate)
        if (problem.key, name) not in self._tried:
            try:
                evaluation = await self._async_evaluator.evaluate(problem, read.candidate)
            except ToolchainMissing as error:
                launch = read.candidate.launch if isinstance(read.candidate, FreeKernel) else None
                if launch is None or (launch.form != "host" and not launch.uses):
                    raise  # its author cannot avoid what is missing: other kernels need it, too
                words = f"it needs what is not installed here: {error.wrong}"
                self._settle(chain, AnswerOutcome(question.id, "contract", read.answer, words=words))
                return
            if (problem.key, name) not in self._tried:  # another chain may have had the same idea meanwhile
                self._take(chain, question, read.answer, name, evaluation)
                return
        before = self._tried[problem.key, name]
        words = f"{before.kind}\n{before.words}"
        self._settle(
            chain, AnswerOutcome(question.id, "duplicate", read.answer, name, before.us, before.ratio, words=words)
        )

    def _take(self, chain: Chain, question: Question, answer: str, name: str, evaluation: Evaluation) -> None:
        """The outcome of a candidate's first evaluation, and its place in the archive."""
        kind, score, gain = kind_of(evaluation, self._gpu), score_of(evaluation), 0.0
        us = None if evaluation.timing is None else evaluation.timing.median_us
        entries: list[Entry] = []
        if kind == "proven" and score is not None and us is not None:
            best = self.archive.best(question.problem)
            gain = max(0.0, score - max(0.0, best.score if best else 0.0))
            entry = Entry(question.problem, question.island, name, config_to_json(evaluation.config), score, us,
                          question.id)  # fmt: skip
            entries = self.archive.insert(entry)
        ratio = None if evaluation.speedup is None else evaluation.speedup.ratio
        hardware = "" if evaluation.timing is None else self.counters.words(evaluation, self._gpu)
        words = feedback_text(evaluation, self._gpu, hardware)
        outcome = AnswerOutcome(question.id, kind, answer, name, us, ratio, gain, words)
        self._tried[question.problem, name] = outcome
        self._settle(chain, outcome, entries)

    def _settle(self, chain: Chain, outcome: AnswerOutcome, entries: Sequence[Entry] = ()) -> None:
        self._journal.settle(outcome, entries)
        chain.outcomes[outcome.question] = outcome
        chain.drop_texts(self._settings.limits)
        self.watch(outcome)

    def _record(self, evaluation: Evaluation) -> None:
        self._store.append(self._run_id, evaluation)
        self._evaluations[evaluation.problem.key, config_name(evaluation.config)] = evaluation

    def _model_of(self, chain: int) -> Model:
        """In turn where weights are equal, else drawn by them; the same for the same chain."""
        weights = [m.weight for m in self._models]
        if len(set(weights)) == 1:
            return self._models[(chain - 1) % len(self._models)]
        return random.Random(f"{self._settings.seed}/model/{chain}").choices(self._models, weights)[0]

    def _begun(self) -> Counter[str]:
        return Counter(c.questions[0].problem for c in self._chains.values() if c.questions)

    def _best(self, key: str) -> tuple[float | None, float | None]:
        """Time and speed-up of the best that is archived."""
        best = self.archive.best(key)
        return (None, None) if best is None else (best.us, self._tried[key, best.name].ratio)

    def _known_us(self, key: str) -> float | None:
        return min((us for us in (self._best(key)[0], *self._baselines[key].values()) if us is not None), default=None)


def log_gap(best_us: float | None, floor_us: float) -> float:
    """Return the natural log of (best known time / floor), at least 0; 1.0 if no time is known.

    Example: ``log_gap(4.0, 2.0)``, of microseconds, is log 2, about 0.693; ``log_gap(1.0, 2.0)`` is 0.0.
    """
    return 1.0 if best_us is None else max(0.0, math.log(best_us / floor_us))


def next_problem(gaps: Mapping[str, float], tries: Mapping[str, int]) -> str | None:
    """Return the key of the next try's problem: the largest gap / (tries + 1), the first of equals.

    A gap below the log of 1.02 is closed. Return None if all gaps are closed, or ``gaps`` is empty. These are D'Hondt's
    divisors, so tries are shared in proportion to the gaps. A key that ``tries`` lacks was tried 0 times.

    Example: ``next_problem({"a": 0.5, "b": 0.9}, {"b": 1})`` is ``"a"``.
    """
    open_gaps = [key for key, value in gaps.items() if value >= CLOSED_GAP]
    return max(open_gaps, key=lambda key: gaps[key] / (tries.get(key, 0) + 1), default=None)
