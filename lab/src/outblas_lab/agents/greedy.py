"""Coordinate descent among the candidates: few knobs at a time from the best so far."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.agents.evolution import encode
from outblas_lab.train.reward import reward

#: Knobs in which a neighbour may differ. A catalogue is sparse: few of its kernels differ in one knob only.
MAX_KNOBS_APART = 3


class Greedy(Agent):
    """Greedy descent: try the nearest neighbours of the best candidate.

    Start at the candidate with the most common knob values. Neighbours that differ from the best in one knob come
    first, then those that differ in two, then three (:data:`MAX_KNOBS_APART`). Ties follow an order of knobs that is
    drawn once per problem. The best is the passed candidate of the current descent with the highest reward. If nothing
    of the descent has passed, or all neighbours were tried, a new descent starts. It starts at a random candidate far
    from all tried ones, or at any random one if none is far.
    """

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        if not left:
            return []
        # Drawn from the seed and the problem alone: a descent keeps its order from proposal to proposal.
        fixed, rng = self.rng(problem, ()), self.rng(problem, history)
        knobs = np.stack([encode(config) for config in left])
        order = fixed.sample(range(knobs.shape[1]), knobs.shape[1])
        passed = [e for e in _descent(history) if e.status is Status.PASSED]
        chosen = _neighbours(knobs, encode(max(passed, key=reward).template), order) if passed else []
        while len(chosen) < min(n, len(left)):
            free = [i for i in range(len(left)) if i not in chosen]
            if history or chosen:
                tried = [encode(e.config) for e in history] + [knobs[i] for i in chosen]
                start = _far(knobs, free, tried, rng)
            else:
                start = _commonest(knobs, fixed)
            around = _neighbours(knobs, knobs[start], order)
            chosen += [start, *(i for i in around if i != start and i not in chosen)]
        return [left[i] for i in chosen[:n]]


def _descent(history: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations since the last start, which is no neighbour of any evaluation before it."""
    found: list[Evaluation] = []
    for evaluation in history:
        knobs = encode(evaluation.config)
        if not any((encode(e.config) != knobs).sum() <= MAX_KNOBS_APART for e in found):
            found = []
        found.append(evaluation)
    return found


def _commonest(knobs: NDArray[np.int32], rng: random.Random) -> int:
    """Return the row whose values occur most often, summed over the knobs; ties are drawn."""
    shared = np.sum([(column[:, None] == column).sum(axis=1) for column in knobs.T], axis=0)
    return int(rng.choice([int(i) for i in np.flatnonzero(shared == shared.max())]))


def _far(knobs: NDArray[np.int32], free: Sequence[int], tried: Sequence[NDArray[np.int32]], rng: random.Random) -> int:
    """Draw one of the rows ``free`` that is no neighbour of any row in ``tried``; draw from all of ``free`` if none is
    so far.
    """
    distance = (knobs[free][:, None] != np.stack(tried)).sum(axis=2).min(axis=1)
    return rng.choice([i for i, d in zip(free, distance, strict=True) if d > MAX_KNOBS_APART] or list(free))


def _neighbours(knobs: NDArray[np.int32], best: NDArray[np.int32], order: Sequence[int]) -> list[int]:
    """Return rows that differ from ``best`` in at most :data:`MAX_KNOBS_APART` knobs.

    Rows with fewer differences come first; ties follow ``order``, a permutation of the knobs.
    """
    differs = knobs[:, order] != best[order]
    count = differs.sum(axis=1)
    near = [int(i) for i in np.flatnonzero(count <= MAX_KNOBS_APART)]
    return sorted(near, key=lambda i: (int(count[i]), np.flatnonzero(differs[i]).tolist()))
