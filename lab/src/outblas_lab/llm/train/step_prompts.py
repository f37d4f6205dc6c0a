"""Prompts of GRPO, made anew at every step: pairs of earlier kernels, and further turns of conversations.

Each turn is a step of its own. The best answer of a group goes on: its outcome is the next prompt of that group. The
conversations of every step lie in a file, so that a resumed training goes on with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation
from outblas.core.files import write_atomic
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.feedback import score_of
from outblas_lab.llm.prompt import FOLLOW_UPS
from outblas_lab.llm.train.answer_judge import JudgedAnswer
from outblas_lab.llm.train.answer_language import Language, Text
from outblas_lab.llm.train.dataset import prompt_messages, proven_evaluations
from outblas_lab.llm.train.rewards import RefusedAnswer
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.training_folder import STAGES, append_line, on_first_process

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


def step_trainer(prompts: StepPrompts, learned: Callable[[], list[float]]) -> type[Any]:
    """Return trl's GRPOTrainer, made to renew its prompts before answers are generated, and to take our advantages.

    trl subtracts the mean of a group from them, in which an answer's own advantage takes part. The methods are private
    ones of trl, whose version is fixed.

    Args:
        learned: returns the advantages of this process's answers of the step.
    """
    from trl import GRPOTrainer

    class StepTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
            made = super()._generate_and_score_completions(prompts.renewed(inputs, int(self.state.global_step)))
            return {**made, "advantages": made["advantages"].new_tensor(learned())}

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            # trl draws the order of an epoch from the state that the epoch before left, which a resumed run lacks.
            sampler = super()._get_train_sampler(dataset)
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(sampler.seed + epoch)
            return sampler

    return StepTrainer


def _conversations(row: dict[str, Any]) -> list[Conversation | None]:
    """Return the conversations of a line of the file, one for each group; None for one that has ended."""
    return [one and Conversation(**{**one, "parents": tuple(one["parents"])}) for one in row["groups"]]


Read = TypeVar("Read")
#: File of the entries with which a stage begins, in its folder.
BEGINNING = "archive.jsonl"
#: All kernels of a problem are one population: a group of answers is small, and its prompts are many.
_SHAPE = ArchiveShape(islands=1)


class TrainingArchive:
    """Proven kernels of a training's problems, by speed."""

    def __init__(self, seed: int, entries: Iterable[Entry] = ()) -> None:
        self._archive = Archive(_SHAPE, seed)
        for entry in entries:
            self._archive.insert(entry)

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order of their insertion."""
        return list(self._archive.entries)

    def add(self, problem: Problem, judged: JudgedAnswer) -> None:
        """Add the kernel of an answer if it was proven and timed beside a baseline; return None.

        A kernel that the problem has already is not added.
        """
        entry = _entry(problem, judged.name, judged.candidate, judged.outcome, judged.speedup, judged.us)
        if entry is not None:
            self._archive.insert(entry)

    def pair(self, problem: Problem, number: int) -> tuple[Entry, ...]:
        """Return two kernels of different speed, the slower first; ``()`` if the problem has no such two.

        Args:
            number: number of the draw. Equal archives, seeds and numbers give equal pairs.
        """
        drawn = self._archive.draw(problem.key, 0, number)
        return drawn if len(drawn) == 2 else ()


def begin_archive(folder: Path, entries: Iterable[Entry]) -> None:
    """Write the entries with which a stage begins into its folder; return None. An existing file is replaced.

    Raises:
        RecordError: the disk refuses.
    """
    write_atomic(folder / BEGINNING, "".join(f"{json.dumps(asdict(entry))}\n" for entry in entries).encode())


def earlier_entries(run: Path, settings: TrainSettings, language: Language) -> Iterator[Entry]:
    """Yield what a stage begins with: the settings' archive, then what passed in earlier stages of the run.

    Only the settings' problems count, and kernels that the language can express.

    Raises:
        RecordError: a file is damaged.
    """
    wanted = {problem.key for problem in settings.problems}
    kept = [] if settings.archive is None else evaluated_entries(proven_evaluations(settings.archive))
    logs = (run / stage / "answers.jsonl" for stage in STAGES[: STAGES.index(settings.stage)])
    for entry in chain(kept, *(logged_entries(log, language) for log in logs)):
        if entry.problem in wanted:
            problem = Problem.from_key(entry.problem)
            if language.write(problem, config_from_json(entry.candidate)) is not None:
                yield entry


def archive_of_stage(folder: Path, language: Language, seed: int) -> TrainingArchive:
    """Return the archive of a stage as its files say: the beginning, then the answers of the log.

    Args:
        folder: the stage's folder. Missing files count as empty.

    Raises:
        RecordError: a file is damaged.
    """
    begun = json_rows(folder / BEGINNING, lambda row: Entry(**row))
    return TrainingArchive(seed, (*begun, *logged_entries(folder / "answers.jsonl", language)))


def logged_entries(path: Path, language: Language) -> Iterator[Entry]:
    """Yield the proven and timed kernels of a log of answers, in order, as :func:`json_rows` reads it."""
    yield from (entry for entry in json_rows(path, partial(_logged, language)) if entry is not None)


def _logged(language: Language, row: dict[str, Any]) -> Entry | None:
    """Return the entry of a line of answers; None if its kernel was not proven and timed."""
    if row["outcome"] != "passed" or row.get("us") is None:
        return None
    problem = Problem.from_key(row["problem"])
    candidate = language.read(problem, row["answer"])
    if isinstance(candidate, RefusedAnswer):
        return None
    values = config_to_json(candidate)
    return _entry(problem, row["kernel"], values, row["outcome"], row["speedup_low"], row["us"])


def evaluated_entries(evaluations: Iterable[Evaluation]) -> Iterator[Entry]:
    """Yield the entries of proven evaluations that have a speed-up, in order."""
    for e in evaluations:
        score = score_of(e)
        if score is not None and e.timing is not None:
            yield Entry(e.problem.key, 0, config_name(e.config), config_to_json(e.config), score, e.timing.median_us, 0)


def _entry(
    problem: Problem, name: str, candidate: dict[str, Any] | None, outcome: str, low: float | None, us: float | None
) -> Entry | None:
    if outcome != "passed" or candidate is None or us is None or low is None or not (math.isfinite(low) and low > 0):
        return None
    return Entry(problem.key, 0, name, candidate, math.log(low), us, 0)


def json_rows(path: Path, read: Callable[[dict[str, Any]], Read]) -> Iterator[Read]:
    """Yield what ``read`` makes of each row of a file of JSON objects, one a line. A missing file has none.

    A last line that a kill has cut off is left out. A damaged line, or an error of ``read``, raises RecordError.
    """
    if not path.exists():
        return
    for number, line in enumerate(read_plain_file(path).split(b"\n")[:-1], 1):
        try:
            yield read(json.loads(line.decode()))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            wrong, do = f"line {number} of {path} cannot be read ({error!r})", "restore a backup, or pass another --run"
            raise RecordError(wrong, "a line written by this release", do) from error
