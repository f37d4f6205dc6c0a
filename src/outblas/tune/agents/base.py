"""The contract of a search: an :class:`Agent` proposes; :mod:`outblas.core.evaluator` answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from outblas.core.config import LAUNCHES, KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu


class Agent:
    """Base class of search agents: choose which candidates to evaluate next.

    The search calls :meth:`propose` for configs, evaluates them and passes the results to :meth:`observe`. To add an
    agent, write a file with a subclass and add a line to ``AGENTS`` in ``agent_table.py`` of outblas-lab. The
    conformance tests then include it.

    A killed run is resumed by asking from the start again, with the recorded answers. So proposals may depend only on
    the arguments, the seed and the observed evaluations. Draw from :meth:`rng`; keep no generator between calls.

    Attributes:
        name: the agent's name in the registry; ``unnamed`` until ``make_agent`` sets it.
        seed: seed of its random draws.
        gpu: GPU that the candidates run on.
        draws: False if proposals do not depend on the seed, so that one run is enough.
        learns: True if the result of :meth:`prepare` depends on the seed.
        every_legal: True if a comparison also offers the candidates that its recording left out.
        across: True if :meth:`prepare_across` learns from recordings of several GPUs at once.
    """

    name = "unnamed"
    draws: bool = True
    learns: bool = False
    every_legal: bool = False
    across: bool = False

    def __init__(self, seed: int, gpu: Gpu) -> None:
        self.seed = seed
        self.gpu = gpu

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Return up to ``n`` different members of ``candidates`` that are not in ``history``.

        The base class raises NotImplementedError.

        Args:
            candidates: every legal config of the problem, in a fixed order.
            history: this problem's evaluations so far, in the order of their proposal.
            n: the largest number of configs to return.

        Returns:
            Configs to evaluate, best guess first. Fewer than ``n`` only if no others are left or the agent has
            finished.
        """
        raise NotImplementedError

    def prepare(self, recording: Any, problems: Sequence[Problem]) -> None:
        """Learn from recorded problems before any search; return None.

        By default an agent learns nothing.

        A comparison passes only the problems that are not held out. What an agent learns across shapes must come from
        these alone, never from a file that was fitted to others.

        Args:
            recording: measurements of ``problems`` and possibly of others, which the agent must not read; a
                ``Recording`` of outblas-lab.
        """

    def prepare_across(self, parts: Sequence[Any]) -> None:
        """Learn from recordings of other GPUs, or of several, before any search; return None.

        By default one part is learned from as by :meth:`prepare`.

        Args:
            parts: training problems of each recording; one ``TrainingPart`` of outblas-lab or more.

        Raises:
            UsageError: there are several parts, and the agent learns from one.
        """
        if len(parts) != 1:
            raise UsageError(f"agent {self.name!r} received {len(parts)} recordings", "one recording", "pass only one")
        self.prepare(parts[0].recording, parts[0].problems)

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Learn from a finished batch, which may hold several problems; the default does nothing and returns None."""

    def rng(self, problem: Problem, history: Sequence[Evaluation]) -> random.Random:
        """Return a new ``random.Random``, seeded by the agent's seed, the problem and the length of ``history`` alone.

        Two calls with the same arguments return generators that draw the same.
        """
        return random.Random(f"{self.seed}/{problem.key}/{len(history)}")


class FixedOrder(Agent):
    """Base class of agents whose order of the candidates does not depend on the measurements of the problem.

    So launch options may take turns in it, however many configs are asked for at a time.
    """

    draws = False

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(self.whole_order(problem, candidates), history)[:n] if candidates else []

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        """Return all candidates, best guess first, tried ones included.

        The base class raises NotImplementedError.

        Args:
            candidates: its legal configs, at least one.
        """
        raise NotImplementedError


def unexplored(candidates: Sequence[KernelConfig], history: Sequence[Evaluation]) -> list[KernelConfig]:
    """Return the candidates whose config is in no evaluation of ``history``, in their order."""
    tried = {evaluation.config for evaluation in history}
    return [config for config in candidates if config not in tried]


def group_by_launch(order: Iterable[KernelConfig]) -> list[list[KernelConfig]]:
    """Return one list each for ``plain``, ``pdl`` and ``weights``; each keeps the order of its configs.

    A config is in the list of the one option that it needs (:func:`outblas.core.config.launch_of`). A launch option
    without configs has an empty list.
    """
    listed = list(order)
    return [[config for config in listed if launch_of(config) == launch] for launch in LAUNCHES]


def interleave(*orders: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Return the first of every order, then the second of every order, and so on; shorter orders just end.

    Duplicates stay. Example: ``interleave([a, b, c], [d])`` returns ``[a, d, b, c]``. No orders give ``[]``.
    """
    return [config for group in zip_longest(*orders) for config in group if config is not None]
