"""Answers that are the knobs of a template kernel as one JSON object, short enough for a small model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outblas.core.config import Candidate, KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.legality import why_illegal
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.compact import read_config, write_config
from outblas_lab.llm.train.answer_language import Read, Text
from outblas_lab.llm.train.rewards import RefusedAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outblas_lab.llm.archive import Entry
    from outblas_lab.llm.train.answer_judge import JudgedAnswer

#: The family of an object that names none: most winners belong to it, and its name takes a dozen tokens.
_FAMILY = "sm90_wgmma_gemm"
#: No knob has more digits. Larger numbers could make the rules of legality slow.
_MAX_DIGITS = 6


class ConfigObjects:
    """Knobs as one JSON object, such as ``{"bm":128,"bn":256,"stages":4}``.

    Knobs at their default may be missing, and so may the family ``sm90_wgmma_gemm``. An answer is this object and
    nothing else: text beside it, a second object or a repeated knob is refused. So are ``pdl`` and ``early``, because
    kernels are compared as plain launches. An illegal kernel is not refused here: the evaluator names the reason.

    Prompts are plain text and show no kernels, which could be copied.

    Args:
        gpu: GPU of the requested kernels.
    """

    name = "config"
    max_tokens = 80

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def prompt(self, problem: Problem, pair: Sequence[Entry] = ()) -> str:
        extents = f"m={problem.m} n={problem.n} k={problem.k}"
        return f"GEMM {extents} {problem.layout} {problem.dtype} {problem.acc}\nknobs:"

    def follow_up(self, problem: Problem | SmallTask, prompt: Text, answer: str, verdict: JudgedAnswer) -> Text:
        return f"{prompt}\n{answer}\nThis was {verdict.kind}. Better knobs:"

    def task_prompt(self, task: SmallTask) -> str:
        wrong = f"language {self.name} does not support task {task.key}"
        raise UsageError(wrong, "a kernel language", "pass --language cuda")

    def read(self, problem: Problem, answer: str) -> Read:
        if not answer.strip():
            return RefusedAnswer("", "empty")
        try:
            knobs = json.loads(answer, object_pairs_hook=_unique, parse_constant=_refused, parse_int=_small)
            config = read_config({"family": _FAMILY, **knobs} if isinstance(knobs, dict) else knobs)
            why_illegal(problem, config, self._gpu)  # raises for knobs that make no kernel, such as a bm of 0
        except (ValueError, ArithmeticError, RecursionError) as error:
            return RefusedAnswer(str(error)[:200])
        if launch_of(config) != "plain":
            return RefusedAnswer("pdl and early are for callers to allow", "illegal")
        return config

    def write(self, problem: Problem, candidate: Candidate) -> str | None:
        if not isinstance(candidate, KernelConfig):
            return None
        knobs = write_config(candidate)
        if candidate.family == _FAMILY:
            del knobs["family"]
        said = json.dumps(knobs, separators=(",", ":"))
        return said if self.read(problem, said) == candidate else None

    def generation(self, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
        return {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a knob is there twice")
    return found


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _small(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
