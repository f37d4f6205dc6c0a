"""Prompts of GRPO that show a pair of earlier kernels, renewed at every step from the archive of the stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outblas.core.problem import Problem
from outblas.llm.train.answer_language import Language, Text
from outblas.llm.train.dataset import prompt_messages
from outblas.llm.train.first_process import on_first_process
from outblas.llm.train.training_archive import TrainingArchive

#: A prompt, and the names of the kernels in it.
_Prompt = tuple[Text, list[str]]


class PairedPrompts:
    """The prompts of a step: one for each group of answers, the same for all its members.

    A pair is drawn by the step and the number of the group, so that a resumed training draws it again.

    Args:
        problems: problems by their index, which rows carry.
        language: makes the prompts.
        chat: prompts are messages; False: text.
        group: answers per prompt.
        archive: archive of the stage; None on every process except the first.
    """

    def __init__(
        self, problems: Sequence[Problem], language: Language, chat: bool, group: int, archive: TrainingArchive | None
    ) -> None:
        self._problems, self._language, self._chat = problems, language, chat
        self._group, self._archive = group, archive

    def renewed(self, rows: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        """Return the rows of this process with ``prompt`` and ``parents``, the names of the shown kernels.

        Every process must call it. A problem without a pair keeps the prompt without kernels.

        Args:
            rows: rows with ``problem``; those of all processes, in order, are whole groups.
            step: number of steps that were taken before.
        """
        made = on_first_process([row["problem"] for row in rows], lambda indices: self._prompts(indices, step))
        return [{**row, "prompt": text, "parents": names} for row, (text, names) in zip(rows, made, strict=True)]

    def _prompts(self, indices: Sequence[int], step: int) -> list[_Prompt]:
        groups = len(indices) // self._group
        made: list[_Prompt] = []
        for number in range(groups):
            prompt = self._prompt(self._problems[indices[number * self._group]], step * groups + number)
            made += [prompt] * self._group
        return made

    def _prompt(self, problem: Problem, number: int) -> _Prompt:
        assert self._archive is not None, "the first process has the archive"
        pair = self._archive.pair(problem, number)
        return prompt_messages(self._language.prompt(problem, pair), self._chat), [entry.name for entry in pair]


def paired_trainer(prompts: PairedPrompts) -> type[Any]:
    """Return trl's GRPOTrainer, made to renew its prompts before answers are generated.

    The method is a private one of trl, whose version is fixed.
    """
    from trl import GRPOTrainer

    class PairedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
            return super()._generate_and_score_completions(prompts.renewed(inputs, int(self.state.global_step)))

    return PairedTrainer
