"""An evolution as its report shows it: read from the run folder alone."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outblas.core.config import Candidate, config_name, config_to_json
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation
from outblas.kernels.custom.free_kernel import FreeKernel
from outblas.llm.archive import Archive, ArchiveShape, Entry
from outblas.llm.budget import Cost
from outblas.llm.evolve_folder import EvolveFiles, read_run
from outblas.llm.evolve_journal import AnswerOutcome, EvolveJournal, Question
from outblas.llm.feedback import OUTCOME_KINDS
from outblas.records.store import Store

#: Ancestors of a kernel that are told of, at most: a longer lineage is no picture.
MAX_ANCESTORS = 200


@dataclass(frozen=True)
class LineageNode:
    """A candidate in a lineage.

    Attributes:
        name: the candidate's. outcome: of its first try. generation: longest way from a candidate
            without parents, among those that are told of.
        parents: names of the candidates that its model was shown, or that it corrects.
    """

    name: str
    outcome: AnswerOutcome
    generation: int
    parents: tuple[str, ...]


@dataclass(frozen=True)
class GroupTotals:
    """What a kind of answers, or a model, has cost and gained; ``kinds``: its outcomes."""

    name: str
    kinds: Counter[str]
    spent: Cost
    new_bests: int
    gain: float


@dataclass(frozen=True)
class EvolveRun:
    """Everything that a run has recorded.

    Attributes:
        about: run.json. costs: of every question, all attempts together.
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
        """A problem's answered questions, in the order of their outcomes."""
        by_id = {q.id: q for q in self.questions}
        return [(by_id[o.question], o) for o in self.outcomes.values() if by_id[o.question].problem == problem]

    def lineage(self, problem: str, name: str) -> list[LineageNode]:
        """A candidate and what it comes from, ancestors first: the :data:`MAX_ANCESTORS` that are nearest."""
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
        for one in sorted(parents, key=tried.__getitem__):  # what a model was shown had been tried before
            mine = [p for p in parents[one] if p in made]
            generation = 1 + max((made[p].generation for p in mine), default=-1)
            made[one] = LineageNode(one, first[one][1], generation, tuple(mine))
        return sorted(made.values(), key=lambda node: (node.generation, node.outcome.question))

    def text(self, problem: str, name: str) -> str:
        """A candidate as it was answered: CUDA C++, or its knobs as JSON; empty where it was never evaluated."""
        found = self.evaluations.get((problem, name))
        return "" if found is None else text_of(found.config)

    def by_answer(self) -> list[GroupTotals]:
        """Code, knobs, and answers with neither."""
        return self._sides(lambda question, outcome: outcome.answer or "neither", ("code", "config", "neither"))

    def by_model(self) -> list[GroupTotals]:
        names = dict.fromkeys(q.model for q in self.questions)
        return self._sides(lambda question, outcome: question.model, names)

    def kinds(self) -> list[tuple[str, int]]:
        """Outcomes that occurred, with how many."""
        counts = Counter(o.kind for o in self.outcomes.values())
        return [(kind, counts[kind]) for kind in OUTCOME_KINDS if counts[kind]]

    def _parents(self, question: Question) -> list[str]:
        """Of a first question the kernels that it shows; of a repair the candidate that was last answered before it."""
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
    """Read a run folder of `outblas evolve`, finished or not.

    Raises:
        RecordError: it is none, or cannot be read.
    """
    files = EvolveFiles(path)
    about = read_run(path)
    if not files.store.is_file():
        raise RecordError(f"{path} has no {files.store.name}", "a run that has begun", "repeat `outblas evolve`")
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


def text_of(candidate: Candidate) -> str:
    """CUDA C++ of a free kernel; the knobs of one of our families, a line each."""
    if isinstance(candidate, FreeKernel):
        return candidate.text
    return json.dumps(config_to_json(candidate), indent=1)
