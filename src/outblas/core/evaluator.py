"""The interface of evaluators, which try configs on problems: on a live GPU, or by look-up in a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from outblas.core.config import KernelConfig, KernelKind
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu


class Evaluator(Protocol):
    """Evaluates (problem, config) pairs, live or from a recording. A Protocol: others implement it.

    ``candidates_of``, ``expect`` and ``trust`` have a body here, which a class that derives from it inherits.
    """

    @property
    def gpu(self) -> Gpu:
        """Return the GPU on which the times were measured."""

    @property
    def source(self) -> str:
        """Return the source of the times in the spelling of ``--device``: ``cuda:0`` or ``replay:h200``."""

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return every config that may be evaluated for a problem, in an order that is the same at every call."""

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        """Return problem -> its :meth:`candidates`, in the order of ``problems``.

        Some evaluators list them in parallel. It raises as :meth:`candidates` does. No problems: an empty mapping.
        """
        return {problem: self.candidates(problem) for problem in problems}

    def expect(self, problems: Iterable[Problem]) -> None:
        """Take the hint that these problems come next; return None. By default it does nothing.

        An evaluator may batch their set-up. Results never depend on it.

        Args:
            problems: the problems that :meth:`evaluate` or :meth:`baselines` will get.
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

    def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterable[Evaluation]:
        """Yield one evaluation per pair, in any order, each as soon as it is finished. No pairs: nothing.

        A config that fails gives an evaluation with the status of its failure. Each evaluation names its problem and
        config. The pairs may come from a slow generator. An evaluator may draw further pairs from it while it works on
        earlier ones.

        Args:
            pairs: (problem, config) pairs.
        """

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Return baseline name -> microseconds per call for a problem; empty if no baseline was timed.

        Example: ``{"torch": 12.5, "lt_auto": 11.9}``.
        """

    def baseline_detail(self, problem: Problem, name: str) -> str:
        """Return one line on a baseline, e.g. the chosen algorithm; an empty string if nothing is known.

        Args:
            problem: the problem.
            name: name of the baseline, e.g. ``lt_auto``.
        """


@contextmanager
def closing_evaluations(evaluations: Iterable[Evaluation]) -> Iterator[Iterator[Evaluation]]:
    """Return a context manager that yields evaluations, and gives up running measurements at its end.

    They would else run on until the garbage collection of their generator.

    Args:
        evaluations: what an evaluator's ``evaluate`` returned.
    """
    source = iter(evaluations)
    try:
        yield source
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
