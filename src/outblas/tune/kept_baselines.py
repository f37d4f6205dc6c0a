"""The algorithms of the baselines in the run's store, so that a resumed run need not time them again."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

from outblas.core.config import Candidate, KernelConfig, KernelKind
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.store import Store


class KeptBaselines(Evaluator):
    """An evaluator whose words on baselines outlive its process.

    The store keeps the times of baselines with each evaluation, and not their algorithms. An evaluator that has not
    timed a problem in this session would time its baselines for a question on them, which takes 0.4 s.

    Args:
        evaluator: evaluates.
        store: keeps the algorithms as outcomes of the run.
        run_id: name of the run in the store.
    """

    def __init__(self, evaluator: Evaluator, store: Store, run_id: str) -> None:
        self._evaluator, self._store, self._run_id = evaluator, store, run_id
        self._kept: dict[Problem, dict[str, str]] = {}

    @property
    def gpu(self) -> Gpu:
        return self._evaluator.gpu

    @property
    def source(self) -> str:
        return self._evaluator.source

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        return self._evaluator.candidates(problem)

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        return self._evaluator.candidates_of(problems)

    def expect(self, problems: Iterable[Problem]) -> None:
        self._evaluator.expect(problems)

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        self._evaluator.trust(kinds)

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Generator[Evaluation, None, None]:
        """Yield the evaluations. When all are done, keep the algorithms of the baselines that were timed with them.

        An evaluator may know them only then. Those of a batch that was given up are asked for, and kept, later.

        Raises:
            RecordError: the store cannot be written; and what the evaluator raises.
        """
        timed: dict[Problem, Iterable[str]] = {}
        with closing_evaluations(self._evaluator.evaluate(pairs)) as evaluations:
            for evaluation in evaluations:
                if evaluation.baselines_us:
                    timed[evaluation.problem] = evaluation.baselines_us
                yield evaluation
        for problem, names in timed.items():
            self._keep(problem, {name: self._evaluator.baseline_detail(problem, name) for name in names})

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return self._evaluator.baselines(problem)

    def baseline_detail(self, problem: Problem, name: str) -> str:
        kept = self._details(problem)
        if name not in kept:
            kept = {**kept, name: self._evaluator.baseline_detail(problem, name)}
            self._keep(problem, kept)
        return kept[name]

    def _keep(self, problem: Problem, details: dict[str, str]) -> None:
        if details != self._details(problem):
            self._store.add_outcome(self._run_id, _piece(problem), details)
            self._kept[problem] = details

    def _details(self, problem: Problem) -> dict[str, str]:
        if problem not in self._kept:
            self._kept[problem] = dict(self._store.outcome(self._run_id, _piece(problem)) or {})
        return self._kept[problem]


def _piece(problem: Problem) -> str:
    return f"baselines of {problem.key}"
