"""The interface of evaluators, which try kernels on problems: on a GPU, from a recording, or by the compiler alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

from outblas.core.config import Candidate, KernelConfig, KernelKind
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu


class Evaluator(Protocol):
    """Evaluates (problem, candidate) pairs. A Protocol: others implement it.

    A class that derives from it has its own ``gpu``, ``source`` and ``evaluate``. The inherited methods offer nothing,
    know no baseline and ignore hints.

    Attributes:
        draws_while_busy: True if :meth:`evaluate` draws further pairs from a generator while it works. The generator
            then yields None while the next pair is not known yet.
    """

    draws_while_busy: ClassVar[bool] = False

    @property
    def gpu(self) -> Gpu:
        """Return the GPU on which the times were measured, or for which kernels are compiled."""

    @property
    def source(self) -> str:
        """Return the source of the answers: ``cuda:0``, ``replay:h200``, ``compile:h200`` or ``recorded:<file>``."""

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return every config that may be evaluated for a problem, in an order that is the same at every call.

        By default none. Free kernels are never among them: they are written, not offered.
        """
        return ()

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        """Return problem -> its :meth:`candidates`, in the order of ``problems``.

        Some evaluators list them in parallel. It raises as :meth:`candidates` does. No problems: an empty mapping.
        """
        return {problem: self.candidates(problem) for problem in problems}

    def expect(self, problems: Iterable[Problem]) -> None:
        """Take the hint that these problems come next; return None. By default it does nothing.

        An evaluator may batch their set-up. Results never depend on it.
        """
        return None

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        """Skip the full proof of some kernels that have passed one. Return None. By default it does nothing.

        Each is still proved on the operands that are timed.

        Args:
            kinds: kernel kinds (:func:`outblas.core.config.kernel_kind`) that were proved with the same build on the
                same GPU model.
        """
        return None

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterable[Evaluation]:
        """Yield one evaluation per pair, in any order, each as soon as it is finished. No pairs: nothing.

        A candidate that fails gives an evaluation with the status of its failure. Each evaluation names its problem and
        candidate. The pairs may come from a slow generator. An evaluator may draw further pairs from it while it works
        on earlier ones.

        Raises:
            UsageError: the evaluator does not answer for this kind of candidate, or does not know the pair.
        """

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Return baseline name -> microseconds per call for a problem; empty if no baseline was timed.

        Example: ``{"torch": 12.5, "lt_auto": 11.9}``.
        """
        return {}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        """Return one line on a baseline, e.g. the chosen algorithm; an empty string if nothing is known."""
        return ""


@contextmanager
def closing_evaluations(evaluations: Iterable[Evaluation]) -> Iterator[Iterator[Evaluation]]:
    """Return a context manager that yields evaluations, and gives up running measurements at its end.

    They would else run on until the garbage collection of their generator.
    """
    source = iter(evaluations)
    try:
        yield source
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
