"""A second search of searched problems: neighbours of the best candidates, and agents of such searches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

from outblas.core.config import KernelConfig, Launch, launch_of
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import even_twin, launch_options
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal
from outblas.tune.agents.base import Agent, interleave, unexplored


class InOrderAgent(Agent):
    """An agent that proposes the candidates in the order in which they are offered, without those in the history."""

    name = "in_order"

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(candidates, history)[:n]


class PreferredFirstAgent(Agent):
    """An agent that proposes known good configs of a problem first, then those of another agent, each once.

    Its name, seed and GPU are the other agent's. It asks the other agent for all candidates, with an empty history. So
    that agent's order does not follow the answers.

    Args:
        first: problem -> configs; those that are not offered are ignored. A problem may be missing.
    """

    def __init__(self, first: Mapping[Problem, Sequence[KernelConfig]], then: Agent) -> None:
        super().__init__(then.seed, then.gpu)
        self.name, self._first, self._then = then.name, first, then

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        offered = set(candidates)
        known = [c for c in self._first.get(problem, ()) if c in offered]
        others = self._then.propose(problem, candidates, (), len(candidates))
        return unexplored(list(dict.fromkeys((*known, *others))), history)[:n]


def tried_by_problem(evaluations: Iterable[Evaluation]) -> dict[Problem, list[Evaluation]]:
    """Return problem -> its evaluations, in their order."""
    found: dict[Problem, list[Evaluation]] = {}
    for evaluation in evaluations:
        found.setdefault(evaluation.problem, []).append(evaluation)
    return found


def winners(tried: Sequence[Evaluation]) -> dict[Launch, KernelConfig]:
    """Return launch option -> the proven candidate with the highest speed-up. Options without one are missing.

    A candidate counts only for the option that it needs itself, see :func:`outblas.core.config.launch_of`. The first
    one wins a tie. Evaluations without a speed-up do not count.
    """
    best: dict[Launch, tuple[float, KernelConfig]] = {}
    for e in tried:
        if e.status is Status.PASSED and e.timing and e.speedup:
            launch = launch_of(e.config)
            if launch not in best or e.speedup.ratio > best[launch][0]:
                best[launch] = (e.speedup.ratio, e.template)
    return {launch: config for launch, (_, config) in best.items()}


def neighbours(problem: Problem, config: KernelConfig, gpu: Gpu) -> list[KernelConfig]:
    """Return legal configs that differ from a config in one idea, as a list without duplicates and without the config.

    Ideas: early loads of B, evenly spread CTAs, then the ideas of the config's family. The list has the first
    suggestion of each idea, then the second of each, and so on. Illegal suggestions are left out, so the list may be
    empty. Early loads and even spreading are suggested only for a config with ``pdl``.
    """
    early = config.with_knobs(early=True) if config.pdl and not config.early else None
    ideas: list[Iterable[KernelConfig | None]] = [
        [early],
        [even_twin(problem, config, gpu)],
        *FAMILIES[config.family].neighbours(problem, config),
    ]
    # The first suggestion of each idea, then the second of each: so a short list has some of every idea.
    mixed = dict.fromkeys(c for turn in zip_longest(*ideas) for c in turn if c is not None)
    return [c for c in mixed if c != config and why_illegal(problem, c, gpu) is None]


def neighbours_of_winners(
    problem: Problem, best: Mapping[Launch, KernelConfig], known: Collection[KernelConfig], gpu: Gpu
) -> list[KernelConfig]:
    """Return neighbours of the winners of a problem that are not known, launch options in turns.

    Only options of :func:`outblas.kernels.catalogue.launch_options` count, for the winners and for their neighbours.
    Without a winner the list is empty.
    """
    options = launch_options(problem, gpu)
    turns = [
        [c for c in neighbours(problem, best[launch], gpu) if c not in known and launch_of(c) in options]
        for launch in options
        if launch in best
    ]
    return list(dict.fromkeys(interleave(*turns)))
