"""The contract of whoever answers (problem, config) pairs: the live GPU or a recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu

if TYPE_CHECKING:
    from outblas.kernels.source import KernelKind


class Evaluator(Protocol):
    """Answers (problem, config) pairs, live or from a recording."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that the figures are of."""

    @property
    def source(self) -> str:
        """Where the figures come from, as ``--device`` names it: ``cuda:0`` or ``replay:h200``."""

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Every config that may be proposed for a problem, in a fixed order."""

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        """The :meth:`candidates` of several problems, which raises as that does; some list them side by side."""
        return {problem: self.candidates(problem) for problem in problems}

    def expect(self, problems: Iterable[Problem]) -> None:
        """Problems that are to come; for evaluators that prepare several at once cheaply. Nothing depends on it."""
        return None

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        """Kernels (:func:`outblas.kernels.source.kernel_kind`) that another evaluator of this run has proved in full,
        of the same build on the same kind of GPU: that needs not be done once more."""
        return None

    def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterable[Evaluation]:
        """One evaluation per pair, in any order; lazily, so that each is recorded when it is finished. The pairs may
        come from a generator that takes time, too: whoever can draws from it while it works on those before."""

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Name -> microseconds per call of the baselines of a problem; empty where none was timed."""

    def baseline_detail(self, problem: Problem, name: str) -> str:
        """One line on a baseline (e.g. the algorithm chosen), empty if there is none."""
