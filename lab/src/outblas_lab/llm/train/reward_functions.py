"""The judge as reward functions of trl: one that is learned from, and one a part that is only logged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from outblas.core.problem import Problem
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.train.answer_judge import JudgedAnswer
from outblas_lab.llm.train.dataset import completion_text
from outblas_lab.llm.train.rewards import PART_NAMES, advantages
from outblas_lab.llm.train.training_folder import append_line, on_first_process

#: What the trainer calls: keyword arguments in, one figure an answer out (None: not judged).
RewardFunction = Callable[..., list["float | None"]]
#: Called after every step with the number of earlier steps, the answers and their verdicts.
Watch = Callable[[int, Sequence[str], Sequence[JudgedAnswer]], None]
#: Name of the function that trains the model.
LEARNED = "advantage"
#: An answer of the present step, on every process: its verdict and its advantage.
_Row = tuple[JudgedAnswer, "float | None"]


@dataclass(frozen=True)
class _Answer:
    """An answer before it is judged: index of its problem, text, names of the kernels in its prompt, and its turn."""

    problem: int
    text: str
    parents: tuple[str, ...]
    turn: int


class Judge(Protocol):
    """A judge of answers to problems, or to small tasks."""

    def judge(self, answers: Sequence[tuple[Any, str]]) -> list[JudgedAnswer]:
        """Return one verdict per answer (problem or task, text), in order."""


class RewardFunctions:
    """Judge the answers of all processes on the first one, and return each process its own.

    ``functions()`` and ``weights()`` are the arguments ``reward_funcs`` and ``reward_weights`` of trl. trl asks several
    functions about the same answers, in order, and adds their values by weights. The first is the group's normalised,
    clipped advantage with weight 1; trl's own normalisation is off. The parts of the reward and their sum have weight
    0: they are logged by name and change nothing.

    Args:
        judge: judge of answers; None on every process except the first.
        problems: problems, or small tasks, by their index; prompts carry the index.
        log: file of answers, to which the first process appends; None: none.
        prepare: called before evaluations begin, on every process, to free GPU memory; None: nothing.
        watch: called with the number of earlier steps, the answers of a step and their verdicts, on the first process;
            None: nothing.

    Attributes:
        best: largest lower bound of a speed-up so far; None before a proven kernel was timed, and on other processes.
    """

    def __init__(
        self, judge: Judge | None, problems: Sequence[Problem | SmallTask], group: int, least_std: float = 0.05,
        clip: float = 2.0,
        log: Path | None = None, prepare: Callable[[], None] | None = None, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self._judge, self._problems, self._group = judge, problems, group
        self._least_std, self._clip = least_std, clip
        self._log, self._prepare, self._watch = log, prepare, watch
        self._own: list[_Row] = []
        #: Best lower bound of a speed-up so far; None before a proven kernel was timed.
        self.best: float | None = None

    def functions(self) -> list[RewardFunction]:
        """Return the seven functions for trl, by ``__name__``.

        These are ``advantage``, ``format``, ``compiled``, ``static``, ``correct``, ``speed`` and ``total``. Each takes
        keyword arguments (``completions``, ``problem``) and returns a list of floats. An answer that was not judged has
        None. The first one must be called before the others, with the same answers.
        """
        return [self._first(), *(self._part(name) for name in (*PART_NAMES, "total"))]

    def weights(self) -> list[float]:
        """Return the weight of each function of :meth:`functions`: 1.0 for the first, 0.0 for the six others."""
        return [1.0, *(0.0 for _ in (*PART_NAMES, "total"))]

    def learned(self) -> list[float]:
        """Return the advantages of this process's answers of the step, in order; 0 for one that was not judged."""
        return [advantage or 0.0 for _, advantage in self._own]

    def _first(self) -> RewardFunction:
        def learned(*, completions: list[Any], problem: list[int], **others: Any) -> list[float | None]:
            step = int(getattr(others.get("trainer_state"), "global_step", 0))
            parents: list[list[str]] = others.get("parents") or [[] for _ in problem]
            turns: list[int] = others.get("turn") or [0 for _ in problem]
            texts = map(completion_text, completions)
            own = [_Answer(*answer) for answer in zip(problem, texts, map(tuple, parents), turns, strict=True)]
            if self._prepare is not None:
                self._prepare()
            self._own = on_first_process(own, lambda answers: self._rows(answers, step))
            metric = others.get("log_metric")
            if metric is not None:
                for name, value in _counts(self._own).items():
                    metric(name, value)
            return [advantage for _, advantage in self._own]

        learned.__name__ = LEARNED
        return learned

    def _part(self, name: str) -> RewardFunction:
        def part(*, completions: list[Any], **_: Any) -> list[float | None]:
            if len(completions) != len(self._own):
                raise RuntimeError(f"{len(completions)} answers for {len(self._own)} judged: trl changed its order")
            return [None if j.parts is None else float(getattr(j.parts, name)) for j, _ in self._own]

        part.__name__ = name
        return part

    def _rows(self, answers: list[_Answer], step: int) -> list[_Row]:
        assert self._judge is not None, "the first process has a judge"
        judged = self._judge.judge([(self._problems[a.problem], a.text) for a in answers])
        totals = [None if j.parts is None else j.parts.total for j in judged]
        learned = advantages(totals, self._group, self._least_std, self._clip)
        lows = [j.speedup for j in judged if j.speedup is not None and j.outcome == "passed"]
        self.best = max([*lows, *([self.best] if self.best is not None else [])], default=None)
        if self._log is not None:
            for answer, verdict, advantage in zip(answers, judged, learned, strict=True):
                append_line(self._log, _line(step, self._problems[answer.problem], answer, verdict, advantage))
        if self._watch is not None:  # after the log, from which a resumed training fills the archive
            self._watch(step, [answer.text for answer in answers], judged)
        return list(zip(judged, learned, strict=True))


def _counts(rows: Sequence[_Row]) -> dict[str, float]:
    """Shares of the answers of a step: that compile, that pass, that are different kernels."""
    outcomes = [judged for judged, _ in rows]
    compiled = [j.parts is not None and j.name != "" and j.parts.compiled == 0.0 for j in outcomes]
    return {
        "answers/compiled": statistics.fmean(compiled),
        "answers/passed": statistics.fmean(j.outcome == "passed" for j in outcomes),
        "answers/different": len({j.name for j in outcomes if j.name}) / len(rows),
    }


def _line(
    step: int, problem: Problem | SmallTask, answer: _Answer, judged: JudgedAnswer, advantage: float | None
) -> dict[str, Any]:
    paid = None if judged.parts is None else {**asdict(judged.parts), "total": judged.parts.total}
    return {
        "step": step + 1,
        "problem": problem.key,
        "turn": answer.turn,
        "parents": list(answer.parents),
        "answer": answer.text,
        "kernel": judged.name,
        "outcome": judged.outcome,
        "detail": judged.detail,
        "parts": paid,
        "speedup_low": judged.speedup,
        "us": judged.us,
        "advantage": advantage,
    }
