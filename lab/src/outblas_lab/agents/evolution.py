"""Mutation among the candidates: a child differs from a good parent in as few knobs as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.families.registry import knobs_by_name
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.train.reward import reward

#: Number of parents: the best proven candidates.
PARENTS = 4
#: Share of proposals drawn at random, so that no candidate is out of reach.
RANDOM_SHARE = 0.15

#: Names of all knobs of all families, sorted.
KNOBS = tuple(sorted(knobs_by_name()))
_codes: dict[object, int] = {}


class EvolutionAgent(Agent):
    """Evolution: mutate the best candidates found so far by few knobs.

    Until a candidate has passed, proposals are random. Then each proposal draws one of the best 4 passed candidates
    (:data:`PARENTS`). The best has weight 1, the next 1/2, and so on; the reward decides the order. The proposal is the
    untried candidate that differs from that parent in the fewest knobs; ties are drawn. A share of 0.15
    (:data:`RANDOM_SHARE`) stays random.
    """

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        rng = self.rng(problem, history)
        left = unexplored(candidates, history)
        passed = [e for e in history if e.status is Status.PASSED]
        parents = [e.config for e in sorted(passed, key=reward, reverse=True)[:PARENTS]]
        if not parents or len(left) <= n:
            return rng.sample(left, min(n, len(left)))
        knobs = np.stack([encode(config) for config in left])
        free = np.ones(len(left), dtype=bool)
        chosen: list[KernelConfig] = []
        for _ in range(n):
            if rng.random() < RANDOM_SHARE:
                pool = np.flatnonzero(free)
            else:
                # Parent i is drawn with weight 1 / 2^i.
                parent = rng.choices(parents, [0.5**i for i in range(len(parents))])[0]
                distance = np.where(free, (knobs != encode(parent)).sum(axis=1), len(KNOBS) + 2)
                pool = np.flatnonzero(distance == distance.min())
            index = int(pool[rng.randrange(len(pool))])
            free[index] = False
            chosen.append(left[index])
        return chosen


def knob_distance(a: KernelConfig, b: KernelConfig) -> int:
    """Return the number of knobs that differ; a different family counts as one of them.

    A knob that only one config has counts as one, too. But some families fix a knob that they lack, e.g. ``split_k`` 1;
    the fixed value is then compared.
    """
    return int((encode(a) != encode(b)).sum())


@lru_cache(maxsize=65536)
def encode(config: KernelConfig) -> NDArray[np.int32]:
    """Return int32[1 + knobs]: a code for the family, then one for each name in ``KNOBS``.

    Equal values have equal codes within one process; the codes mean nothing else. A knob that the family lacks has the
    code of None, or of the value that the family fixes. The array is cached: do not change it.
    """
    values = [config.family, *(getattr(config, knob, None) for knob in KNOBS)]
    # The type is part of the key: True == 1 as a dictionary key.
    return np.array([_codes.setdefault((type(v), v), len(_codes)) for v in values], dtype=np.int32)
