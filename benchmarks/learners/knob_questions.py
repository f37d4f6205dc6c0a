"""Short questions on knobs to a language model, and an account of its answers: for equal_budgets.py."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from learners.answers import Chat, Message

from outblas.core.config import KernelConfig, knob_schema, value_text
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.kernels.families.registry import FAMILIES
from outblas.tune.agents.base import Agent
from outblas_lab.agents.llm import Ask, LanguageModel, shared_knobs
from outblas_lab.llm.compact import write_config
from outblas_lab.llm.prompt import tokens_of

HERE = Path(__file__).parent
#: Most tokens of a question (:func:`outblas_lab.llm.prompt.tokens_of`) and of its answer.
PROMPT_TOKENS, ANSWER_TOKENS = 1200, 300
#: Candidates of the regressor in a prompt with its list.
LISTED = 10
#: Whether a prompt has meanings of knobs, and its largest number of measured kernels: the first pair that fits counts.
LENGTHS = ((True, 12), (False, 12), (False, 9), (False, 6), (False, 3))
#: Origins of a choice. A copy of the example or of the list is written, too.
ORIGINS = ("written", "copied", "nearest", "filled")


class NoAnswer(UsageError):
    """A question that no transcript answers, without a model to ask."""


class KnobChooser(LanguageModel):
    """A language model that gets short questions, with the list of a regressor or without.

    Attributes:
        account: origin of each choice (:data:`ORIGINS`), in the order of the proposals.
    """

    def __init__(self, gpu: Gpu, ask: Ask, regressor: Agent | None = None) -> None:
        super().__init__(0, gpu, ask)
        self.account: list[str] = []
        self._regressor, self._shown = regressor, set[KernelConfig]()

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        found = super().propose(problem, candidates, history, n)
        self.account += [
            "copied" if origin == "written" and config in self._shown else origin
            for config, origin in self.origins.items()
        ]
        return found

    def question(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[Message]:
        """Return one message. Meanings of knobs and slow kernels are left out if it would have too many tokens."""
        listed = [] if self._regressor is None else self._regressor.propose(problem, candidates, history, LISTED)
        example = self.rng(problem, ()).choice(candidates)  # the same in each round, as the server keeps what it read
        self._shown = {example, *listed}
        tried = sorted(history, key=lambda e: e.timing.median_us if e.timing else math.inf)
        for meanings, most in LENGTHS:
            text = _question(problem, self.gpu, candidates, tried[:most], listed, example, n, meanings)
            messages = [{"role": "user", "content": text}]
            if tokens_of(messages) <= PROMPT_TOKENS:
                break
        return messages


def _question(
    problem: Problem, gpu: Gpu, candidates: Sequence[KernelConfig], tried: Sequence[Evaluation],
    listed: Sequence[KernelConfig], example: KernelConfig, n: int, meanings: bool,
) -> str:  # fmt: skip
    shared = shared_knobs(candidates)
    list_lines = ["", "A model predicts that these are the fastest of those left, the best first:"]
    list_lines += [_written(config, shared) for config in listed] + [""]
    return Template((HERE / "choose.md").read_text()).substitute(
        n=n, gpu=gpu.name.upper(), sms=gpu.sms, smem=gpu.smem_optin, m=problem.m, n_=problem.n, k=problem.k,
        layout=problem.layout, dtype=problem.dtype, acc=problem.acc, floor=f"{floor_us(problem, gpu):.2f}",
        regime=regime(problem, gpu).partition("_")[0], knobs="\n".join(_knobs(candidates, meanings)),
        listed="\n".join(list_lines) if listed else "", example=_written(example, shared),
        tried="\n".join(_result(e, shared) for e in tried) or "none",
    )  # fmt: skip


def _knobs(candidates: Sequence[KernelConfig], meanings: bool) -> Iterator[str]:
    """Yield a line on each family, and one on each of its knobs that differs among the candidates."""
    for family in (name for name in FAMILIES if any(c.family == name for c in candidates)):
        cls, mine = FAMILIES[family].config, [c for c in candidates if c.family == family]
        told = dict(re.findall(r"^ {4}(\w+): ([^:;.,\n]*)", inspect.getdoc(cls) or "", re.M)) if meanings else {}
        yield f"family {family}"
        for knob in knob_schema(cls):
            values = sorted({getattr(c, knob.name) for c in mine})
            if len(values) > 1:
                meaning = f" ({told[knob.name]})" if told.get(knob.name) else ""
                default = f"; default {value_text(knob.default)}" if knob.default in values else ""
                yield f"- {knob.name}{meaning}: {', '.join(map(value_text, values))}{default}"


def _written(config: KernelConfig, shared: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a config as an answer should have it: without the knobs on which all candidates agree."""
    known = shared[config.family]
    return json.dumps({name: value for name, value in write_config(config).items() if name not in known})


def _result(e: Evaluation, shared: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{_written(e.template, shared)} {f'{e.timing.median_us:.2f} us' if e.timing else 'failed'}"


class Transcript:
    """Answers in a journal under the hash of the model's weights, and the model that gives the missing ones.

    Attributes:
        chat: the model; None: only what the journal has.

    Args:
        weights: SHA-256 of the model's file; empty: that of the journal's answers.

    Raises:
        UsageError: the journal has answers of other weights.
    """

    def __init__(self, journal: Journal, weights: str = "") -> None:
        self._journal = journal
        self.chat: Chat | None = None
        answers = [entry for entry in journal.entries if entry["kind"] == "answer"]
        known = {entry["weights"] for entry in answers}
        if weights and known - {weights}:
            wrong = f"{journal.path} has answers of other weights than {weights[:16]}"
            raise UsageError(wrong, f"the model with SHA-256 {known.pop()}", "pass that model, or another --out")
        self.weights = weights or next(iter(known), "")
        self._known = {entry["question"]: str(entry["text"]) for entry in answers}

    def __call__(self, messages: Sequence[Message], seed: int) -> str:
        """Return the answer. It is asked for once.

        Raises:
            NoAnswer: the journal has none, and there is no model.
        """
        text = json.dumps([self.weights, list(messages), seed])
        question = hashlib.sha256(text.encode()).hexdigest()
        if question not in self._known:
            if self.chat is None:
                raise NoAnswer("a question has no answer yet", "a language model", "pass --gguf PATH")
            begun = time.monotonic()
            reply = self.chat.ask(messages, ANSWER_TOKENS, seed)
            took = round(time.monotonic() - begun, 2)
            head = {"kind": "answer", "question": question, "weights": self.weights, "messages": list(messages)}
            self._journal.append({**head, "seconds": took, **reply})
            self._known[question] = reply["text"]
        return self._known[question]
