"""The contract of a search: an :class:`Agent` proposes; :mod:`outblas.core.evaluator` answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_of
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu

if TYPE_CHECKING:
    from outblas.records.recording import Recording


class Agent:
    """Chooses which candidates to try: ask with :meth:`propose`, tell with :meth:`observe`.

    To add an agent, write one file with a subclass and one line in ``agents/__init__.py``; the
    conformance tests then run on it by themselves.

    A run that was killed is resumed by asking again from the start, with the recorded answers in
    place of new ones. So the proposals may depend only on the arguments, on the seed and on what was
    observed: draw from :meth:`rng`, never from a generator kept between calls.

    Attributes:
        name: its name in the registry.
        gpu: what the candidates will run on.
        draws: False: proposals do not depend on the seed, one run tells all.
        learns: True: what :meth:`prepare` learns depends on the seed, and so do proposals from then on.
    """

    name = "unnamed"
    draws: bool = True
    learns: bool = False

    def __init__(self, seed: int, gpu: Gpu) -> None:
        self.seed = seed
        self.gpu = gpu

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Up to ``n`` different members of ``candidates`` that are not in ``history``.

        Args:
            candidates: every legal config of the problem, in a fixed order.
            history: this problem's evaluations so far, in the order in which they were proposed.

        Returns:
            Configs to evaluate, most wanted first; fewer than ``n`` only when no others are left, or
            when the agent has nothing more to try.
        """
        raise NotImplementedError

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Learn from recorded problems before any search; the default learns nothing.

        Whoever compares agents calls it with the problems that are not held out, and with no other: an agent that
        learns across shapes uses nothing else that was fitted on measurements from then on.

        Args:
            recording: holds ``problems``, and others that must not be looked at.
        """

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Learn from a finished batch, over all its problems; the default learns nothing."""

    def rng(self, problem: Problem, history: Sequence[Evaluation]) -> random.Random:
        """A generator that depends on the seed, the problem and how many were tried, and on nothing else."""
        return random.Random(f"{self.seed}/{problem.key}/{len(history)}")


def unexplored(candidates: Sequence[KernelConfig], history: Sequence[Evaluation]) -> list[KernelConfig]:
    """The candidates that were not tried yet, in their order."""
    tried = {evaluation.config for evaluation in history}
    return [config for config in candidates if config not in tried]


def group_by_launch(order: Iterable[KernelConfig], launches: Sequence[Launch] = LAUNCHES) -> list[list[KernelConfig]]:
    """The configs of each launch option, in their order."""
    listed = list(order)
    return [[config for config in listed if launch_of(config) == launch] for launch in launches]


def each_launch(
    candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int,
    order: Callable[[list[KernelConfig], list[Evaluation]], list[KernelConfig]],
) -> list[KernelConfig]:  # fmt: skip
    """Up to ``n`` proposals of searches that are each of one launch option and take turns.

    The option that was measured least is next, the first of those that are level.

    Args:
        order: called with an option's candidates and its part of the history; its proposals, most wanted first.
    """
    orders, made = [], []
    for group in group_by_launch(candidates):
        if group:
            own = [e for e in history if launch_of(e.config) == launch_of(group[0])]
            orders.append(order(group, own)[:n])
            made.append(len(own))
    chosen: list[KernelConfig] = []
    while len(chosen) < n and any(orders):
        turn = min((i for i, left in enumerate(orders) if left), key=made.__getitem__)
        chosen.append(orders[turn].pop(0))
        made[turn] += 1
    return chosen


def interleave(*orders: Sequence[KernelConfig]) -> list[KernelConfig]:
    """The first of every order, then the second of every order, and so on."""
    return [config for group in zip_longest(*orders) for config in group if config is not None]
