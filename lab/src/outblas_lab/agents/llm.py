"""A language model that chooses among the candidates, written in the compact language of their knobs.

It is asked once per round and problem. A config that is not offered is replaced by the nearest one that is. Missing
choices are filled in the order of the ranking model. :attr:`LanguageModel.origins` says which choice is the model's.
The cache folder keeps each answer under the whole question, so that a resumed run pays nothing twice and gets the same
answers.

Environment variables set the server: OUTBLAS_LLM_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY. OUTBLAS_LLM_BUDGET limits
one process (:func:`outblas_lab.llm.budget.parse_budget`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import ConfigError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import Agent, group_by_launch, interleave, unexplored
from outblas_lab.agents.evolution import knob_distance
from outblas_lab.agents.fitted_heuristic import FittedHeuristic
from outblas_lab.train.reward import reward

if TYPE_CHECKING:
    from outblas_lab.llm.budget import Message
    from outblas_lab.recordings.recording import Recording

#: Tried candidates that a prompt lists: the best, and the last.
_BEST, _LAST = 8, 8
_MAX_TOKENS = 4096
#: What may stand around the objects of a list.
_AROUND = "[], \t\r\n"

#: (conversation, seed) -> the answer's text.
Ask = Callable[[Sequence["Message"], int], str]
#: A choice is as the answer has it, the nearest that is offered, or the ranking model's.
Origin = Literal["written", "nearest", "filled"]


class LanguageModel(Agent):
    """A language model chooses among the candidates and learns from the outcomes.

    The constructor sends nothing.

    Attributes:
        origins: config -> where it comes from, for each of the last proposal, in its order.

    Args:
        ask: answers the questions; None: :func:`connect`.

    Raises:
        UsageError: no model or server is set, or its address or ``OUTBLAS_LLM_BUDGET`` is invalid.
        ToolchainMissing: a package of the extra ``llm`` is not installed.
    """

    def __init__(self, seed: int, gpu: Gpu, ask: Ask | None = None) -> None:
        super().__init__(seed, gpu)
        self._ask, self._ranking = ask or connect(), FittedHeuristic(seed, gpu)
        self.origins: dict[KernelConfig, Origin] = {}

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Fit the ranking model as :meth:`FittedHeuristic.prepare`, so that it knows no held-out problem either."""
        self._ranking.prepare(recording, problems)

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Return configs as :meth:`Agent.propose` does.

        If at most ``n`` candidates are left, all are returned in their order and nothing is asked. Otherwise there is
        one question, answered from the cache if it was asked before. A choice that is not offered, or was tried,
        becomes the untried candidate with the fewest different knobs. Missing choices are filled in the order of the
        ranking model, launch options in turns. So an answer without a readable choice is no error.

        If the server gives no answer, one of these errors is raised; a repeated run resumes here.

        Raises:
            Unanswered: no attempt was answered.
            RequestRejected: the server refuses this question.
            ServerError: the server refuses every question or cannot be reached.
            BudgetSpent: the next request could pass the budget.
        """
        left = unexplored(candidates, history)
        self.origins = dict.fromkeys(left, "filled")
        if len(left) <= n:
            return left
        text = self._ask(self.question(problem, candidates, history, n), self.seed)
        free, self.origins = dict.fromkeys(left), {}
        for config in read_choices(text, shared_knobs(candidates))[:n]:
            nearest = config if config in free else min(free, key=partial(knob_distance, config))
            self.origins[nearest] = "written" if nearest == config else "nearest"
            del free[nearest]
        rest = list(free)
        ranked = [rest[i] for i in self._ranking.rank(problem, rest)]
        missing = interleave(*group_by_launch(ranked))[: n - len(self.origins)]
        self.origins |= dict.fromkeys(missing, "filled")
        return list(self.origins)

    def question(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[Message]:
        """Return the messages that ask for ``n`` configs; the arguments are those of :meth:`propose`."""
        return _prompt(problem, self.gpu, candidates, history, n)


def shared_knobs(candidates: Sequence[KernelConfig]) -> dict[str, dict[str, Any]]:
    """Return family -> the knobs on which all its candidates agree, with their values."""
    found: dict[str, dict[str, Any]] = {}
    for config in candidates:
        shared = found.setdefault(config.family, config.knobs())
        found[config.family] = {name: value for name, value in shared.items() if getattr(config, name) == value}
    return found


def read_choices(text: str, shared: Mapping[str, Mapping[str, Any]] | None = None) -> list[KernelConfig]:
    """Return the configs of an answer in its order, each once, without unreadable ones.

    Only the last fenced block of language ``json`` counts: a list of objects, or objects one after another, since small
    models often forget the brackets. An object is ``{"family": ..., knob: value}``; knobs with a default may be
    missing. What follows the first text that is no JSON is not read. The configs need not be legal or offered.

    Args:
        text: the answer.
        shared: family -> values of knobs that count before their defaults where the answer leaves them out.
    """
    from outblas_lab.llm.answer import fenced
    from outblas_lab.llm.compact import read_config

    blocks = [body for language, body in fenced(text) if language == "json"]
    found: dict[KernelConfig, None] = {}
    for one in _values(blocks[-1]) if blocks else ():
        try:
            known = (shared or {}).get(str(one.get("family")), {}) if isinstance(one, dict) else {}
            found[read_config({**known, **one} if known else one)] = None
        except ConfigError:
            continue
    return list(found)


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a list, with or without its brackets and commas, up to what is no JSON."""
    rest = text.lstrip(_AROUND)
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return
        yield value
        rest = rest[end:].lstrip(_AROUND)


def connect() -> Ask:
    """Return a function ``ask(messages, seed)`` that returns the text of the server's answer.

    It answers from the cache folder if the same server, model, seed and messages were asked before. Nothing is sent
    until it is called.

    Raises:
        UsageError: OUTBLAS_LLM_MODEL is not set, or neither a server nor a key is. Also if the server's address or
            OUTBLAS_LLM_BUDGET is invalid.
        ToolchainMissing: a package of the extra ``llm`` is not installed.
    """
    from outblas_lab.llm.budget import Budget, SpendingAccount, parse_budget
    from outblas_lab.llm.client import AnswerOptions, Client, check_server
    from outblas_lab.llm.models import Model

    name = os.environ.get("OUTBLAS_LLM_MODEL", "")
    if not name:
        raise UsageError("agent 'llm' has no model", "OUTBLAS_LLM_MODEL, plus either OPENAI_BASE_URL or OPENAI_API_KEY",
                         "set them, e.g. OUTBLAS_LLM_MODEL=... OPENAI_BASE_URL=http://localhost:8000/v1")  # fmt: skip
    check_server()
    limits = os.environ.get("OUTBLAS_LLM_BUDGET", "")
    account = SpendingAccount(parse_budget(limits) if limits else Budget())

    async def asked(messages: Sequence[Message], seed: int) -> str:
        client = Client(None, account, _NoRequestLog(), options=AnswerOptions(_MAX_TOKENS, extra={"seed": seed}))
        try:
            return (await client.ask(0, messages, Model(name))).text
        finally:
            await client.close()

    def ask(messages: Sequence[Message], seed: int) -> str:
        path = _cached(name, messages, seed)
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["answer"])
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: asked again
            text = asyncio.run(asked(messages, seed))
        write_atomic(path, json.dumps({"model": name, "messages": list(messages), "answer": text}).encode())
        return text

    return ask


class _NoRequestLog:
    """A request log that keeps nothing: the cache keeps the answers."""

    def sent(self, question: int, most: object) -> int:
        return 0

    def replied(self, send: int, reply: object) -> None:
        return None


def _cached(model: str, messages: Sequence[Message], seed: int) -> Path:
    from outblas.runtime.cubin import default_directory

    text = json.dumps([os.environ.get("OPENAI_BASE_URL", ""), model, seed, list(messages)], sort_keys=True)
    return default_directory() / "llm" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _prompt(
    problem: Problem, gpu: Gpu, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
) -> list[Message]:
    from outblas_lab.llm.prompt import choice_prompt

    compared = (e for e in history if e.status is Status.PASSED and e.speedup is not None)
    best = sorted(compared, key=reward, reverse=True)[:_BEST]
    shown = dict.fromkeys((*map(_line, best), *map(_line, history[-_LAST:])))
    return choice_prompt(problem, gpu, candidates, list(shown), n)


def _line(e: Evaluation) -> str:
    if e.timing is None or e.speedup is None:
        time = "" if e.timing is None else f", {e.timing.median_us:.2f} us"
        return f"{config_name(e.config)}: {e.status} {e.detail}".rstrip() + time
    return f"{config_name(e.config)}: {e.timing.median_us:.2f} us, {e.speedup.ratio:.3f}x of the fastest baseline"
