"""The toy language: a kernel configuration as a short sentence, one word a knob."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outblas.core.config import Candidate, knob_schema
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json
from outblas.kernels.families.registry import FAMILIES
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.prompt import FOLLOW_UPS
from outblas_lab.llm.train.answer_language import Read, Text
from outblas_lab.llm.train.rewards import RefusedAnswer

if TYPE_CHECKING:
    from outblas_lab.llm.train.answer_judge import JudgedAnswer

#: Words of a prompt about a pair of kernels, and of a further turn.
_OF_PROMPTS = ("slower", "faster", "at", "why", "was", *FOLLOW_UPS)


class KnobWords:
    """Sentences of knobs, such as ``bm=128 bn=256 stages=4 consumers=2``.

    A toy for models that know no programming language. Sampling keeps to the sentence's grammar, but not to legal
    kernels. A random model's answers thus compile or fail, and are fast or slow.

    A prompt is text such as ``problem TN fp16 fp32 m 5 1 2 n 5 1 2 k 5 1 2 answer``. With a pair of kernels it ends in
    ``slower bm=64 bn=32 stages=2 consumers=1 at 9 0 faster bm=64 bn=64 stages=4 consumers=1 at 1 1 0 why``. The figures
    are percent of the fastest baseline's speed. An answer to ``why`` begins with a word such as ``because_bn``, which
    names the knob that makes the difference. Reading skips it, and nothing rewards it.

    Reading refuses a text that is not one word per knob, in order, each a listed value. ``max_tokens`` is the number of
    knobs plus 2. ``name`` is ``knobs``.

    Args:
        knobs: knob -> values, in the order of the sentence. A sentence describes the first family that has all of them
            as numbers. Its other knobs keep their defaults, but ``bm`` and ``bn`` are 64.

    Raises:
        UsageError: no family has all knobs as numbers, or a knob is without values.
    """

    name = "knobs"
    KNOBS: Mapping[str, tuple[int, ...]] = {
        "bm": (64, 128, 192, 256),
        "bn": (32, 64, 128, 256),
        "stages": (2, 4, 8),
        "consumers": (1, 2),
    }

    def __init__(self, knobs: Mapping[str, Sequence[int]] = KNOBS) -> None:
        numbers = {
            family: {knob.name for knob in knob_schema(FAMILIES[family].config) if knob.kind == "int"}
            for family in FAMILIES
        }
        first = max(numbers, key=lambda family: len(numbers[family].intersection(knobs)))
        self.record, known = FAMILIES[first].config, numbers[first]
        for knob, values in knobs.items():
            if knob not in known or not values:
                wrong = f"knob {knob!r} is unknown or has no values"
                expected = f"one of {sorted(known)}, with at least one value"
                raise UsageError(wrong, expected, "correct the knob")
        self.knobs = {knob: tuple(values) for knob, values in knobs.items()}

    @property
    def max_tokens(self) -> int:
        return len(self.knobs) + 2

    def words(self) -> list[tuple[str, ...]]:
        """Return the words at each place of the sentence, e.g. ``[("bm=64", "bm=128"), ("bn=32",)]``."""
        return [tuple(f"{knob}={value}" for value in values) for knob, values in self.knobs.items()]

    def vocabulary(self) -> list[str]:
        """Return every word of prompts, then of answers, without special tokens.

        Reasons are among those of answers. A word may occur twice. The list begins with ``["problem", "m", "n", "k",
        "answer", "TN", "NN"]``.
        """
        types = ["TN", "NN", "fp16", "bf16", "fp32"]
        asked = ["problem", "m", "n", "k", "answer", *types, *"0123456789", *_OF_PROMPTS]
        return [*asked, *self.reasons(), *itertools.chain.from_iterable(self.words())]

    def reasons(self) -> list[str]:
        """Return the words that may begin an answer about a pair, e.g. ``["because_bm", "because_bn"]``."""
        return [f"because_{knob}" for knob in self.knobs]

    def prompt(self, problem: Problem, pair: Sequence[Entry] = ()) -> str:
        extents = " ".join(f"{name} {' '.join(str(getattr(problem, name)))}" for name in ("m", "n", "k"))
        asked = f"problem {problem.layout} {problem.dtype} {problem.acc} {extents}"
        if not pair:
            return f"{asked} answer"
        slower, faster = (self._shown(problem, entry) for entry in pair)
        return f"{asked} slower {slower} faster {faster} why"

    def _shown(self, problem: Problem, entry: Entry) -> str:
        speed = " ".join(str(round(100 * math.exp(entry.score))))
        return f"{self.write(problem, config_from_json(entry.candidate))} at {speed}"

    def follow_up(self, problem: Problem | SmallTask, prompt: Text, answer: str, verdict: JudgedAnswer) -> str:
        return f"{prompt} {answer} was {verdict.kind} answer"

    def task_prompt(self, task: SmallTask) -> str:
        wrong = f"language {self.name} does not support task {task.key}"
        raise UsageError(wrong, "a kernel language", "pass --language cuda")

    def read(self, problem: Problem, answer: str) -> Read:
        said, words_at = answer.split(), self.words()
        if said and said[0] in self.reasons():
            said = said[1:]
        if len(said) != len(words_at) or any(word not in place for word, place in zip(said, words_at, strict=False)):
            return RefusedAnswer(f"{' '.join(said)[:80]!r} is not a sentence of {', '.join(self.knobs)}")
        values: dict[str, Any] = {
            knob: int(word.partition("=")[2]) for knob, word in zip(self.knobs, said, strict=True)
        }
        return self.record(**{"bm": 64, "bn": 64, **values})

    def write(self, problem: Problem, candidate: Candidate) -> str | None:
        if not isinstance(candidate, self.record):
            return None
        said = " ".join(f"{knob}={getattr(candidate, knob)}" for knob in self.knobs)
        return said if self.read(problem, said) == candidate else None

    def generation(self, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
        """Return ``{"bad_words_ids": [[before, after], ...]}``: every pair of ids that the grammar does not allow.

        After the word ``why`` only a reason is allowed. After a reason, the word ``answer`` and each word of the
        sentence, only the words of the next place are allowed. The end of text follows the last place.
        """
        words_at = [["answer", *self.reasons()], *self.words(), [tokenizer.eos_token]]
        banned: list[list[int]] = []
        for here, there in ((["why"], self.reasons()), *itertools.pairwise(words_at)):
            allowed = set(tokenizer.convert_tokens_to_ids(list(there)))
            for before in tokenizer.convert_tokens_to_ids(list(here)):
                banned += [[before, after] for after in range(vocabulary) if after not in allowed]
        return {"bad_words_ids": banned}
