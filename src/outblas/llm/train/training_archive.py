"""The archive of a GRPO stage: proven kernels, from which each prompt shows a pair of different speed.

It begins with a file of entries in the stage's folder. What passes in training is added to it, and lies in the log of
answers. So a resumed training has the archive that an uninterrupted one has at that step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
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
from outblas.llm.archive import Archive, ArchiveShape, Entry
from outblas.llm.feedback import score_of
from outblas.llm.train.answer_judge import JudgedAnswer
from outblas.llm.train.answer_language import Language
from outblas.llm.train.dataset import proven_evaluations
from outblas.llm.train.rewards import RefusedAnswer
from outblas.llm.train.settings import TrainSettings
from outblas.llm.train.training_folder import STAGES

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
    """Yield the proven and timed kernels of a log of answers, in order. A missing log has none.

    Raises:
        RecordError: the file is damaged.
    """
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

    A last line that a kill has cut off is left out.

    Args:
        read: takes a row; a KeyError, TypeError or ValueError means that the row is damaged.

    Raises:
        RecordError: a line is damaged.
    """
    if not path.exists():
        return
    for number, line in enumerate(read_plain_file(path).split(b"\n")[:-1], 1):
        try:
            yield read(json.loads(line.decode()))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            wrong = f"{path} has a line {number} that cannot be read ({error!r})"
            raise RecordError(
                wrong, "a line that this release wrote", "restore a copy, or choose another run"
            ) from error
