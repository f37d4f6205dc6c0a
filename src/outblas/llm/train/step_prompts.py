"""Prompts of GRPO, made anew at every step: pairs of earlier kernels, and further turns of conversations.

Each turn is a step of its own. The best answer of a group goes on: its outcome is the next prompt of that group. The
conversations of every step lie in a file, so that a resumed training goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outblas.core.problem import Problem
from outblas.judge.small_tasks import SmallTask
from outblas.llm.prompt import FOLLOW_UPS
from outblas.llm.train.answer_judge import JudgedAnswer
from outblas.llm.train.answer_language import Language, Text
from outblas.llm.train.dataset import prompt_messages
from outblas.llm.train.training_archive import TrainingArchive, json_rows
from outblas.llm.train.training_folder import append_line, on_first_process

#: File of the conversations, in the stage's folder.
CONVERSATIONS = "conversations.jsonl"


@dataclass(frozen=True)
class Conversation:
    """The prompt of a group.

    Attributes:
        turn: number of the turn, from 0.
        parents: names of the kernels that its first prompt shows.
    """

    problem: int
    turn: int
    prompt: Text
    parents: tuple[str, ...] = ()


class StepPrompts:
    """The prompts of a step, one for each group of answers. All but ``renewed`` is called in the first process only.

    Pairs are drawn by the step and the number of the group. So a resumed training draws them again.

    Args:
        asked: problems, or small tasks, by their index, which rows carry.
        chat: prompts are messages; False: text.
        archive: archive of the stage, which receives what passes; None: prompts show no kernels.
        folder: the stage's folder; its last conversations go on.

    Raises:
        RecordError: the file of conversations is damaged.
    """

    def __init__(
        self, asked: Sequence[Problem | SmallTask], language: Language, chat: bool, group: int, turns: int,
        archive: TrainingArchive | None, folder: Path,
    ) -> None:  # fmt: skip
        self._asked, self._language, self._chat = asked, language, chat
        self._group, self._turns, self._archive = group, turns, archive
        self._file = folder / CONVERSATIONS
        self._going_on: list[Conversation | None] = []
        for groups in json_rows(self._file, _conversations):
            self._going_on = groups
        self._now: list[Conversation] = []

    def renewed(self, rows: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        """Return the rows of this process with their prompt of this step, its problem, turn and shown kernels.

        Every process must call it. The rows of all processes, in order, are whole groups.

        Args:
            rows: rows with ``problem``, the index of the problem of a new conversation.
        """
        made = on_first_process([row["problem"] for row in rows], lambda indices: self._begin(indices, step))
        return [
            {**row, "problem": one.problem, "prompt": prompt_messages(one.prompt, self._chat),
             "parents": list(one.parents), "turn": one.turn}
            for row, one in zip(rows, made, strict=True)
        ]  # fmt: skip

    def judged(self, step: int, texts: Sequence[str], verdicts: Sequence[JudgedAnswer]) -> None:
        """Take in the answers to the prompts of a step; return None."""
        for number, one in enumerate(self._now):
            problem = self._asked[one.problem]
            if self._archive is not None and isinstance(problem, Problem):
                for verdict in verdicts[number * self._group :][: self._group]:
                    self._archive.add(problem, verdict)
        if self._turns > 1:
            self._going_on = [self._next(number, one, texts, verdicts) for number, one in enumerate(self._now)]
            groups = [None if one is None else asdict(one) for one in self._going_on]
            append_line(self._file, {"step": step + 1, "groups": groups})

    def _begin(self, indices: Sequence[int], step: int) -> list[Conversation]:
        """Return the conversation of each answer of a step."""
        groups = len(indices) // self._group
        left = self._going_on if len(self._going_on) == groups else [None] * groups
        self._now = [
            going_on or self._new(indices[number * self._group], step * groups + number)
            for number, going_on in enumerate(left)
        ]
        return [one for one in self._now for _ in range(self._group)]

    def _new(self, index: int, number: int) -> Conversation:
        problem = self._asked[index]
        if isinstance(problem, SmallTask):
            return Conversation(index, 0, self._language.task_prompt(problem))
        pair = () if self._archive is None else self._archive.pair(problem, number)
        return Conversation(index, 0, self._language.prompt(problem, pair), tuple(entry.name for entry in pair))

    def _next(
        self, number: int, now: Conversation, texts: Sequence[str], verdicts: Sequence[JudgedAnswer]
    ) -> Conversation | None:
        """Return the next turn of a conversation; None if it ends."""
        mine = range(number * self._group, (number + 1) * self._group)
        best = max(mine, key=lambda i: -float("inf") if (parts := verdicts[i].parts) is None else parts.total)
        verdict = verdicts[best]
        if now.turn + 1 >= self._turns or verdict.kind not in FOLLOW_UPS:
            return None
        problem = self._asked[now.problem]
        prompt = self._language.follow_up(problem, now.prompt, texts[best], verdict)
        return Conversation(now.problem, now.turn + 1, prompt, now.parents)


def step_trainer(prompts: StepPrompts) -> type[Any]:
    """Return trl's GRPOTrainer, made to renew its prompts before answers are generated.

    The method is a private one of trl, whose version is fixed.
    """
    from trl import GRPOTrainer

    class StepTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
            return super()._generate_and_score_completions(prompts.renewed(inputs, int(self.state.global_step)))

    return StepTrainer


def _conversations(row: dict[str, Any]) -> list[Conversation | None]:
    """Return the conversations of a line of the file, one for each group; None for one that has ended."""
    return [one and Conversation(**{**one, "parents": tuple(one["parents"])}) for one in row["groups"]]
