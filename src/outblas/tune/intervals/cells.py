"""Evaluations of kernels on the problems of a weight, each from the run's store or measured now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.problem import Problem
from outblas.core.weight import WeightRange
from outblas.kernels.legality import why_illegal
from outblas.records.store import Store
from outblas.tune.intervals.sampled_m import inside

#: A question: a kernel at an M.
Ask = tuple[int, KernelConfig]
#: Statuses that say nothing against a kernel at another M.
_NO_FAILURE = (Status.PASSED, Status.LEFT_OUT, Status.ILLEGAL)


class Cells:
    """The evaluations of a weight that this session knows: M -> kernel -> evaluation.

    A resumed session asks the same questions in the same order, and the store answers those that it holds. So it knows
    at each step what the killed session knew.

    Args:
        asked: the weight and its range.
        evaluator: answers questions.
        store: keeps each evaluation before the next is asked.
        run_id: name of the run in the store.
        offered: M that can be measured, in rising order.
        only_offered: a recording answers, which knows only the kernels that it offers.
    """

    def __init__(
        self,
        asked: WeightRange,
        evaluator: Evaluator,
        store: Store,
        run_id: str,
        offered: Sequence[int],
        only_offered: bool = False,
    ) -> None:
        self.range, self.evaluator, self.offered = asked, evaluator, offered
        self._store, self._run_id, self._only_offered = store, run_id, only_offered
        self._at: dict[int, dict[KernelConfig, Evaluation]] = {}
        self._listed: dict[int, frozenset[KernelConfig]] = {}
        self._legal_at: dict[int, dict[KernelConfig, bool]] = {}
        self._legal: dict[KernelConfig, list[tuple[int, int]]] = {}
        self._illegal: dict[KernelConfig, int] = {}

    def add(self, evaluations: Iterable[Evaluation]) -> None:
        """Take evaluations of the weight's problems, e.g. of the search."""
        for e in evaluations:
            self._at.setdefault(e.problem.m, {})[e.template] = e

    @property
    def ms(self) -> list[int]:
        """Return each M with an evaluation, in rising order."""
        return sorted(self._at)

    def at(self, m: int) -> dict[KernelConfig, Evaluation]:
        """Return kernel -> evaluation at an M, as a new dict; empty if nothing was measured."""
        return dict(self._at.get(m, ()))

    def failed(self) -> frozenset[KernelConfig]:
        """Return the kernels that failed at any M. They serve none, because a proof at one M is a proof for all.

        Where nothing could be launched no kernel is to blame: the product may exceed the memory.
        """
        every = (e for m, known in self._at.items() if self.was_launched(m) for e in known.values())
        return frozenset(e.template for e in every if e.status not in _NO_FAILURE)

    def was_launched(self, m: int) -> bool:
        """Return whether anything could be launched at an M."""
        return any(e.baselines_us or e.status is not Status.LAUNCH_ERROR for e in self._at.get(m, {}).values())

    def may_run(self, m: int, config: KernelConfig) -> bool:
        """Return whether a kernel can be measured at an M: it is legal, and a recording has it."""
        if not self.is_legal_at(config, m):
            return False
        if not self._only_offered:
            return True
        if m not in self._listed:
            self._listed[m] = frozenset(self.evaluator.candidates(self.range.problem(m)))
        return config in self._listed[m]

    def is_legal_at(self, config: KernelConfig, m: int) -> bool:
        """Return whether a kernel is legal at an M. Answers are kept, since each look at the runs asks again."""
        known = self._legal_at.setdefault(m, {})
        if config not in known:
            known[config] = why_illegal(self.range.problem(m), config, self.evaluator.gpu) is None
        return known[config]

    def runnable(self, configs: Sequence[KernelConfig], first: int, last: int) -> Sequence[int]:
        """Return the M between ``first`` and ``last``, without both, at which all of some kernels may run.

        They are those that a recording offers, or any M of a live GPU, also one that was not to be searched.
        """
        between = inside(self.offered if self._only_offered else range(first, last + 1), first, last)
        if not self._only_offered and all(self.is_legal(config, first, last) for config in configs):
            return between
        return [m for m in between if all(self.may_run(m, config) for config in configs)]

    def is_legal(self, config: KernelConfig, first: int, last: int) -> bool:
        """Return whether a kernel is legal for every M from ``first`` to ``last``, both in the range.

        Answers are kept for spans, not for each M of them.
        """
        if first <= self._illegal.get(config, first - 1) <= last:
            return False
        spans = self._legal.setdefault(config, [])
        if any(a <= first and last <= b for a, b in spans):
            return True
        gpu = self.evaluator.gpu
        wrong = next((m for m in range(first, last + 1) if why_illegal(self.range.problem(m), config, gpu)), None)
        if wrong is None:
            spans.append((first, last))
        else:
            self._illegal[config] = wrong
        return wrong is None

    def unknown(self, asks: Iterable[Ask]) -> list[Ask]:
        """Return the questions that can be answered and were not yet, each once, grouped by M."""
        new = [(m, c) for m, c in dict.fromkeys(asks) if c not in self._at.get(m, ()) and self.may_run(m, c)]
        return sorted(new, key=lambda ask: ask[0])

    def measure(self, asks: Sequence[Ask], stop: Callable[[], bool], tell: Callable[[], None]) -> bool:
        """Answer questions, from the store where it can; return whether ``stop`` ended it.

        Args:
            asks: what :meth:`unknown` returned.
            stop: called after every new measurement; True ends it.
            tell: called after every answer.

        Raises:
            RecordError: the store cannot be written. Earlier records are intact.
        """
        todo: list[tuple[Problem, KernelConfig]] = []
        ms = dict.fromkeys(m for m, _ in asks)
        kept = {m: self._store.recorded(self._run_id, self.range.problem(m), profiled=False) for m in ms}
        for m, config in asks:
            if config in kept[m]:
                self.add([kept[m][config]])
                tell()
            else:
                todo.append((self.range.problem(m), config))
        if not todo:
            return False
        self.evaluator.expect(dict.fromkeys(problem for problem, _ in todo))
        with closing_evaluations(self.evaluator.evaluate(todo)) as evaluations:
            for evaluation in evaluations:
                self._store.append(self._run_id, evaluation)
                self.add([evaluation])
                tell()
                if stop():
                    return True
        return False
