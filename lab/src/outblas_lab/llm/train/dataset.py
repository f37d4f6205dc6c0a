"""Data of a training: prompts for GRPO, and pairs of prompt and answer for the supervised stage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outblas.core.config import Candidate
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.gpu_records import reference_gpu
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json
from outblas.records.evaluation_json import evaluation_from_json
from outblas_lab.jail.plausibility import is_below_floor
from outblas_lab.llm.train.answer_language import Language, Text
from outblas_lab.llm.train.rewards import RefusedAnswer

#: Kernels per problem that are learned from, the fastest.
KERNELS_PER_PROBLEM = 8


def prompt_messages(prompt: Text, chat: bool) -> Text:
    r"""Return a prompt as messages if ``chat`` is true, else as text to which an answer is appended.

    Text becomes one message of the user. Messages become their contents, with a blank line between two. The returned
    text always ends with an added line break: ``prompt_messages("x", False)`` is ``"x\n"``.
    """
    if chat:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return (prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)) + "\n"


def answer_messages(text: str, chat: bool) -> Text:
    return [{"role": "assistant", "content": text}] if chat else text


def completion_text(completion: Any) -> str:
    """Return the text of a completion: the text itself, or the content of the last of its messages.

    A content of None, or a missing one, is "". Example: ``completion_text([{"role": "assistant", "content": "a"}])``
    and ``completion_text("a")`` return ``"a"``.
    """
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def prompt_rows(prompts: Sequence[Text], chat: bool, least: int) -> list[dict[str, Any]]:
    """Return a list of the rows of a prompt dataset, ``{"prompt": ..., "problem": index in prompts}``.

    All prompts are repeated in turns until there are at least ``least`` rows. So the number of rows is a multiple of
    the number of prompts. Example: 3 prompts and a ``least`` of 4 give 6 rows, with the indices 0, 1, 2, 0, 1 and 2.

    Args:
        chat: a prompt is a list of messages, ``{"role": ..., "content": ...}``; False: a text.
        least: smallest number of rows, above 0.
    """
    times = -(-least // len(prompts))
    return [
        {"prompt": prompt_messages(prompt, chat), "problem": index}
        for _ in range(times)
        for index, prompt in enumerate(prompts)
    ]


def supervised_rows(path: str | Path, language: Language, chat: bool) -> list[dict[str, Any]]:
    r"""Return rows ``{"prompt": ..., "completion": ...}`` from an archive of kernels that passed.

    Of evaluations, the 8 fastest proven kernels of each problem are taken, the fastest first. Failed ones, and kernels
    that the language cannot express, are left out. Every other line gives one row, before those of evaluations.

    Args:
        path: a store (SQLite) of evaluations. Or JSON lines, each ``{"prompt": ..., "completion": ...}``, ``{"problem":
            "512_512_512", "answer": ...}``, ``{"problem": ..., "config": ...}`` or an evaluation
            (``Evaluation.to_json``). A config is that of ``to_json``, with every knob. A header line is skipped.

    Raises:
        RecordError: the file is missing or cannot be read, or a line is none of these. Also an answer that the language
            refuses, and a config (without a status) that it cannot express.
        UsageError: the file holds no usable example.
    """
    path = _existing(path)
    of_store = _of_evaluations(proven_evaluations(path), language, chat) if _is_store(path) else None
    rows = list(of_store or _of_lines(path, language, chat))
    if not rows:
        raise UsageError(
            f"archive {path} has no training data in language {language.name}",
            "evaluations of passing kernels that the language can express",
            "pass another --archive",
        )
    return rows


def proven_evaluations(path: str | Path) -> list[Evaluation]:
    """Return an archive's proven evaluations (:func:`supervised_rows`), in order; other lines are skipped.

    Raises:
        RecordError: the file is missing or cannot be read, or an evaluation is damaged.
    """
    path = _existing(path)
    if _is_store(path):
        from outblas.records.store import Store

        with Store(path) as store:
            return [e for e in store.evaluations() if _is_proven(e)]
    found: list[Evaluation] = []
    for number, row in _json_rows(path):
        if "status" in row:
            with _readable(path, number):
                found.append(evaluation_from_json(row))
    return [e for e in found if _is_proven(e)]


def _of_lines(path: Path, language: Language, chat: bool) -> Iterator[dict[str, Any]]:
    evaluations: list[Evaluation] = []
    for number, row in _json_rows(path):
        with _readable(path, number):
            if "completion" in row:
                yield {
                    "prompt": prompt_messages(row["prompt"], chat),
                    "completion": answer_messages(row["completion"], chat),
                }
            elif "answer" in row:
                yield _row(_problem(row["problem"]), str(row["answer"]), language, chat)
            elif "status" in row:
                evaluations.append(evaluation_from_json(row))
            else:
                problem = _problem(row["problem"])
                answer = language.write(problem, config_from_json(row["config"]))
                if answer is None:
                    raise ValueError(f"language {language.name} cannot express the kernel")
                yield _row(problem, answer, language, chat)
    yield from _of_evaluations(evaluations, language, chat)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the line, its object) without blank lines and the head of a recording."""
    for number, line in enumerate(read_plain_file(path).split(b"\n"), 1):
        if line.strip():
            with _readable(path, number):
                row = dict(json.loads(line.decode()).items())
            if "problem" in row or "format" not in row:
                yield number, row


@contextmanager
def _readable(path: Path, number: int) -> Iterator[None]:
    """Turn errors of reading a line within the ``with`` block into a RecordError that names it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OutblasError) as error:
        raise RecordError(
            f"line {number} of archive {path} cannot be read ({error})",
            "a prompt and completion, a problem and answer, or an evaluation",
            "remove the line, or pass another --archive",
        ) from error


def _of_evaluations(found: Iterable[Evaluation], language: Language, chat: bool) -> Iterator[dict[str, Any]]:
    by_problem: dict[Problem, dict[Candidate, Evaluation]] = {}
    for e in found:
        if _is_proven(e):
            by_problem.setdefault(e.problem, {}).setdefault(e.config, e)
    for problem, passed in by_problem.items():
        best = sorted(passed.values(), key=lambda e: e.timing.median_us if e.timing else 0.0)
        answers = (language.write(problem, e.config) for e in best)
        for answer in [a for a in answers if a is not None][:KERNELS_PER_PROBLEM]:
            yield _row(problem, answer, language, chat)


def _is_proven(evaluation: Evaluation) -> bool:
    return evaluation.status is Status.PASSED and not is_below_floor(evaluation, reference_gpu())


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise RecordError(f"archive {path} does not exist", "a store or a JSON Lines file", "correct the path")
    return Path(path)


def _row(problem: Problem, answer: str, language: Language, chat: bool) -> dict[str, Any]:
    read = language.read(problem, answer)
    if isinstance(read, RefusedAnswer):
        raise ValueError(f"an answer that would be rejected: {read.reason}")
    return {"prompt": prompt_messages(language.prompt(problem), chat), "completion": answer_messages(answer, chat)}


def _problem(data: Any) -> Problem:
    """Of ``M_N_K``, a problem's key, or its JSON."""
    if not isinstance(data, str):
        return Problem.from_json(data)
    return Problem.from_mnk(data) if data.count("_") == 2 else Problem.from_key(data)


def _is_store(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(15) == b"SQLite format 3"
