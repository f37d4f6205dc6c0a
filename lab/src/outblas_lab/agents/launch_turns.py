"""Base classes of agents: those that search each launch option by itself, and those that learn across recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outblas.core.config import KernelConfig, launch_of
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.tune.agents.base import Agent, group_by_launch
from outblas_lab.recordings.recording import Recording, TrainingPart


class LearnsAcross(Agent):
    """Base class of agents that learn from one recording as from several, by :meth:`prepare_across`."""

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Learn from one recording; see :meth:`outblas.tune.agents.base.Agent.prepare`."""
        self.prepare_across([TrainingPart(recording, tuple(problems))])


class LaunchTurns(Agent):
    """Base class of agents that search each launch option by itself; the options take turns (:func:`each_launch`)."""

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return each_launch(candidates, history, n, lambda group, own: self.order(problem, group, own, n))

    def order(
        self, problem: Problem, group: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Return untried configs of one launch option, best guess first.

        The base class raises NotImplementedError.

        Args:
            group: legal candidates of the option, tried ones included.
            history: the option's evaluations so far, in the order of their proposal.
            n: configs that are used; those after them may be left out.
        """
        raise NotImplementedError


def each_launch(
    candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int,
    order: Callable[[list[KernelConfig], list[Evaluation]], list[KernelConfig]],
) -> list[KernelConfig]:  # fmt: skip
    """Return up to ``n`` proposals of one search per launch option; the searches take turns.

    The next turn goes to the option with the fewest measurements and proposals; the first one wins ties. Options are in
    the order ``plain``, ``pdl``, ``weights``. So without history, four proposals are ``plain``, ``pdl``, ``weights``,
    ``plain``.

    Args:
        candidates: legal configs of all launch options.
        order: function of one option's candidates, tried ones included, and its part of the history. It returns that
            option's untried configs, best guess first.
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
