"""The languages of answers by name, and that of CUDA."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outblas.core.config import Candidate, config_to_json
from outblas.core.errors import unknown_name
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.answer import CODE, CONFIG
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.train.answer_language import Language, Read, Text
from outblas_lab.llm.train.config_objects import ConfigObjects
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.rewards import RefusedAnswer

if TYPE_CHECKING:
    from outblas_lab.llm.train.answer_judge import JudgedAnswer

LANGUAGES = ("cuda", "config", "knobs")


def language_of(name: str) -> Language:
    """Return a new language object by its name of :data:`LANGUAGES`, in lower case.

    Raises:
        UsageError: no such language.
    """
    if name == "cuda":
        return CudaAnswers(reference_gpu())
    if name == "config":
        return ConfigObjects(reference_gpu())
    if name == "knobs":
        return KnobWords()
    raise unknown_name("language", name, LANGUAGES, "pass one of them as --language")


#: Host code shares the process that judges it. A model that is paid by the verdict would learn to forge it.
_HOST_FORM = 'the kernel has form "host"; only form "device" is accepted here, which is launched for you'


class CudaAnswers:
    """Prompts and answers of ``outblas evolve``, so that a model trained here can write there.

    Kernels of form ``host`` are neither asked for nor taken, because they could forge the verdict that is the reward.

    Args:
        gpu: GPU of the requested kernels. A config that is not legal there is refused.
    """

    name = "cuda"
    max_tokens = 4096

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def prompt(self, problem: Problem, pair: Sequence[Entry] = ()) -> Text:
        from outblas_lab.llm.prompt import Asked, first_prompt

        best_us = min((entry.us for entry in pair), default=None)
        messages = first_prompt(problem, self._gpu, {}, best_us, pair, {}, Asked(host_form=False))
        return [dict(message) for message in messages]

    def follow_up(self, problem: Problem | SmallTask, prompt: Text, answer: str, verdict: JudgedAnswer) -> Text:
        from outblas_lab.llm.prompt import follow_up

        assert not isinstance(prompt, str), "prompts of this language are messages"
        product, kinds = (problem.problem, (CODE,)) if isinstance(problem, SmallTask) else (problem, (CODE, CONFIG))
        asked = follow_up(verdict.kind, verdict.words, product, self._gpu, verdict.us, self.max_tokens, kinds)
        said = [{"role": "assistant", "content": answer}] if answer.strip() else []
        return [*prompt, *said, {"role": "user", "content": asked}]

    def task_prompt(self, task: SmallTask) -> Text:
        from outblas_lab.llm.prompt import small_task_prompt

        return [dict(message) for message in small_task_prompt(task, self._gpu)]

    def read(self, problem: Problem, answer: str) -> Read:
        from outblas_lab.llm.answer import read_answer

        found = read_answer(answer, "stop", problem, self._gpu)
        if found.candidate is None:
            return RefusedAnswer(found.words, found.kind)
        if isinstance(found.candidate, FreeKernel) and found.candidate.launch.form != "device":
            return RefusedAnswer(_HOST_FORM, "contract")
        return found.candidate

    def write(self, problem: Problem, candidate: Candidate) -> str | None:
        if isinstance(candidate, FreeKernel):
            said = f"```cuda\n{candidate.text.strip()}\n```"
        else:
            said = f"```json\n{json.dumps(config_to_json(candidate))}\n```"
        return said if self.read(problem, said) == candidate else None

    def generation(self, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
        return {}
