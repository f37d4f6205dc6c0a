"""The contract of a search: an :class:`Agent` proposes; :mod:`outblas.core.evaluator` answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu

if TYPE_CHECKING:
    from outblas.learn.train.training_part import TrainingPart
    from outblas.records.recording import Recording


class Agent:
    """Base class of search agents: choose which candidates to evaluate next.

    The search calls :meth:`propose` for configs, evaluates them and passes the results to :meth:`observe`. To add an
    agent, write a file with a subclass and add a line to ``AGENTS`` in ``agent_registry.py``. The conformance tests
    then include it.

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

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Learn from recorded problems before any search; return None.

        By default an agent learns as by its :meth:`prepare_across`; without that, nothing.

        A comparison passes only the problems that are not held out. What an agent learns across shapes must come from
        these alone, never from a file that was fitted to others.

        Args:
            recording: measurements of ``problems`` and possibly of others, which the agent must not read.
        """
        if type(self).prepare_across is not Agent.prepare_across:
            from outblas.learn.train.training_part import TrainingPart

            self.prepare_across([TrainingPart(recording, tuple(problems))])

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Learn from recordings of other GPUs, or of several, before any search; return None.

        By default one part is learned from as by :meth:`prepare`.

        Args:
            parts: training problems of each recording; one part or more.

        Raises:
            UsageError: there are several parts, and the agent learns from one.
        """
        if len(parts) != 1:
            raise UsageError(f"agent {self.name!r} with {len(parts)} recordings", "one recording", "name one")
        self.prepare(parts[0].recording, parts[0].problems)

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Learn from a finished batch, which may hold several problems; the default does nothing and returns None."""

    def rng(self, problem: Problem, history: Sequence[Evaluation]) -> random.Random:
        """Return a new ``random.Random``, seeded by the agent's seed, the problem and the length of ``history`` alone.

        Two calls with the same arguments return generators that draw the same.
        """
        return random.Random(f"{self.seed}/{problem.key}/{len(history)}")


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


def group_by_launch(order: Iterable[KernelConfig], launches: Sequence[Launch] = LAUNCHES) -> list[list[KernelConfig]]:
    """Return one list per launch option, in the order of ``launches``; each keeps the order of its configs.

    A config is in the list of the one option that it needs (:func:`outblas.core.config.launch_of`). A launch option
    without configs has an empty list, so by default there are always three. Configs of an option outside ``launches``
    are dropped.

    Args:
        order: configs.
        launches: launch options; default ``("plain", "pdl", "weights")``.
    """
    listed = list(order)
    return [[config for config in listed if launch_of(config) == launch] for launch in launches]


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
        history: the problem's evaluations so far.
        n: the largest number of configs to return.
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


def interleave(*orders: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Return the first of every order, then the second of every order, and so on; shorter orders just end.

    Duplicates stay. Example: ``interleave([a, b, c], [d])`` returns ``[a, d, b, c]``. No orders give ``[]``.
    """
    return [config for group in zip_longest(*orders) for config in group if config is not None]
