"""An evolution as its report shows it, read from the directory of the run alone."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.budget import Cost
from outblas_lab.llm.evolve_folder import EvolveFiles, read_run
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal, Question
from outblas_lab.llm.feedback import OUTCOME_KINDS

#: Ancestors of a kernel that a page shows at most; a longer lineage would not be readable.
MAX_ANCESTORS = 200


@dataclass(frozen=True)
class LineageNode:
    """A candidate in a lineage.

    Attributes:
        generation: number of steps of the longest path from a candidate without shown parents; 0 for such a one.
        parents: names of the candidates that the model was shown, or that this one corrects.
    """

    name: str
    outcome: AnswerOutcome
    generation: int
    parents: tuple[str, ...]


@dataclass(frozen=True)
class GroupTotals:
    """Cost and gain of one kind of answers, or of one model.

    Attributes:
        kinds: outcome -> number of answers.
        spent: requests, tokens and price.
        new_bests: answers that raised the best speed-up of their problem.
        gain: sum of the logarithms of these rises.
    """

    name: str
    kinds: Counter[str]
    spent: Cost
    new_bests: int
    gain: float


@dataclass(frozen=True)
class EvolveRun:
    """The complete record of a run.

    Attributes:
        outcomes: question -> outcome of its answer.
        costs: question -> cost of all attempts together.
        attempts: outcome of a request -> number of requests.
        evaluations: (problem key, candidate's name) -> evaluation.
    """

    path: Path
    about: dict[str, Any]
    questions: tuple[Question, ...]
    outcomes: dict[int, AnswerOutcome]
    costs: dict[int, Cost]
    attempts: Counter[str]
    entries: tuple[Entry, ...]
    evaluations: dict[tuple[str, str], Evaluation]

    @property
    def problems(self) -> list[str]:
        return list(self.about["problems"])

    @cached_property
    def archive(self) -> Archive:
        return Archive(ArchiveShape(**self.about["settings"]["shape"]), self.about["settings"]["seed"], self.entries)

    @property
    def spent(self) -> Cost:
        return sum(self.costs.values(), Cost())

    def of(self, problem: str) -> list[tuple[Question, AnswerOutcome]]:
        """Return the answered questions of a problem, in the order of their outcomes."""
        by_id = {q.id: q for q in self.questions}
        return [(by_id[o.question], o) for o in self.outcomes.values() if by_id[o.question].problem == problem]

    def lineage(self, problem: str, name: str) -> list[LineageNode]:
        """Return the nearest :data:`MAX_ANCESTORS` ancestors of a candidate, then the candidate."""
        first = {o.name: (q, o) for q, o in reversed(self.of(problem)) if o.name and o.kind != "duplicate"}
        if name not in first:
            return []
        parents: dict[str, list[str]] = {}
        waiting = deque([name])
        while waiting and len(parents) <= MAX_ANCESTORS:
            one = waiting.popleft()
            if one not in parents:
                parents[one] = [p for p in self._parents(first[one][0]) if p in first]
                waiting.extend(parents[one])
        made: dict[str, LineageNode] = {}
        tried = {one: place for place, one in enumerate(reversed(first))}
        for one in sorted(parents, key=tried.__getitem__):  # a model is shown only candidates that were tried before
            mine = [p for p in parents[one] if p in made]
            generation = 1 + max((made[p].generation for p in mine), default=-1)
            made[one] = LineageNode(one, first[one][1], generation, tuple(mine))
        return sorted(made.values(), key=lambda node: (node.generation, node.outcome.question))

    def text(self, problem: str, name: str) -> str:
        """Return a candidate as CUDA C++ or as knobs in JSON; an empty text if it was never evaluated."""
        found = self.evaluations.get((problem, name))
        if found is None:
            return ""
        candidate = found.config
        return candidate.text if isinstance(candidate, FreeKernel) else json.dumps(config_to_json(candidate), indent=1)

    def by_answer(self) -> list[GroupTotals]:
        """Return the totals of answers with code, with knobs, and with neither."""
        return self._sides(lambda question, outcome: outcome.answer or "neither", ("code", "config", "neither"))

    def by_model(self) -> list[GroupTotals]:
        """Return the totals of each model, in the order in which the run first asked them."""
        names = dict.fromkeys(q.model for q in self.questions)
        return self._sides(lambda question, outcome: question.model, names)

    def kinds(self) -> list[tuple[str, int]]:
        """Return the outcomes that occurred, with their counts."""
        counts = Counter(o.kind for o in self.outcomes.values())
        return [(kind, counts[kind]) for kind in OUTCOME_KINDS if counts[kind]]

    def _parents(self, question: Question) -> list[str]:
        """Return the kernels that a first question shows, or the candidate that a repair corrects."""
        chain = [q for q in self.questions if q.chain == question.chain and q.turn < question.turn]
        for before in reversed(chain):
            outcome = self.outcomes.get(before.id)
            if outcome is not None and outcome.name:
                return [outcome.name]
        return list(question.parents)

    def _sides(self, side_of: Callable[[Question, AnswerOutcome], str], names: Iterable[str]) -> list[GroupTotals]:
        by_id = {q.id: q for q in self.questions}
        sides = []
        for name in names:
            mine = [o for o in self.outcomes.values() if side_of(by_id[o.question], o) == name]
            spent = sum((self.costs.get(o.question, Cost()) for o in mine), Cost())
            best = sum(o.gain > 0 for o in mine)
            sides.append(GroupTotals(name, Counter(o.kind for o in mine), spent, best, sum(o.gain for o in mine)))
        return [side for side in sides if side.kinds]


def load_evolution(path: Path) -> EvolveRun:
    """Read the directory of an `outblas evolve` run, finished or not.

    Raises:
        RecordError: the directory holds no such run, or it cannot be read.
    """
    files = EvolveFiles(path)
    about = read_run(path)
    if not files.store.is_file():
        raise RecordError(f"{path} has no {files.store.name}", "a run that has started", "rerun `outblas evolve`")
    with Store(files.store) as store:
        evaluations = {(e.problem.key, config_name(e.config)): e for e in store.evaluations()}
    with EvolveJournal(files.store) as journal:
        costs: dict[int, Cost] = {}
        attempts: Counter[str] = Counter()
        for question, reply in journal.replies():
            costs[question] = costs.get(question, Cost()) + reply.took
            attempts[reply.outcome] += 1
        questions, entries = tuple(replace(q, messages=()) for q in journal.questions()), tuple(journal.entries())
        return EvolveRun(path, about, questions, journal.outcomes(), costs, attempts, entries, evaluations)
