"""Coordinate descent among the candidates: few knobs at a time from the best so far."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.learn.reward import reward
from outblas.search.agents.base import Agent, unexplored
from outblas.search.agents.evolution import encode

#: Knobs in which a neighbour may differ. A catalogue is sparse: few of its kernels differ in one knob only.
MAX_KNOBS_APART = 3


class Greedy(Agent):
    """From the candidate with the commonest knobs to its best neighbour, and on from there.

    The neighbours that differ from the best of the descent in one knob come first, then those that differ in two, and
    so on up to :data:`MAX_KNOBS_APART`; equals go knob after knob, in an order drawn once for the problem. Where all
    of them were tried, a descent starts anew from a random candidate far from all that was.
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
        best = _best(_descent(history))
        chosen = [] if best is None else _neighbours(knobs, encode(best), order)
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
    """What was tried since the last start, which is a candidate that is nobody's neighbour in the descent before."""
    found: list[Evaluation] = []
    for evaluation in history:
        knobs = encode(evaluation.config)
        if not any((encode(e.config) != knobs).sum() <= MAX_KNOBS_APART for e in found):
            found = []
        found.append(evaluation)
    return found


def _best(evaluations: Sequence[Evaluation]) -> KernelConfig | None:
    passed = [e for e in evaluations if e.status is Status.PASSED]
    return max(passed, key=reward).template if passed else None


def _commonest(knobs: NDArray[np.int32], rng: random.Random) -> int:
    """The row whose values the most others share, summed over the knobs; one of the equals drawn."""
    shared = np.sum([(column[:, None] == column).sum(axis=1) for column in knobs.T], axis=0)
    return int(rng.choice([int(i) for i in np.flatnonzero(shared == shared.max())]))


def _far(knobs: NDArray[np.int32], free: Sequence[int], tried: Sequence[NDArray[np.int32]], rng: random.Random) -> int:
    """One of the rows ``free``, drawn among those that are no neighbours of any that was tried, if there are such."""
    distance = (knobs[free][:, None] != np.stack(tried)).sum(axis=2).min(axis=1)
    return rng.choice([i for i, d in zip(free, distance, strict=True) if d > MAX_KNOBS_APART] or list(free))


def _neighbours(knobs: NDArray[np.int32], best: NDArray[np.int32], order: Sequence[int]) -> list[int]:
    """Rows that differ from ``best`` in at most :data:`MAX_KNOBS_APART` knobs: fewest first, then by ``order``."""
    differs = knobs[:, order] != best[order]
    count = differs.sum(axis=1)
    near = [int(i) for i in np.flatnonzero(count <= MAX_KNOBS_APART)]
    return sorted(near, key=lambda i: (int(count[i]), np.flatnonzero(differs[i]).tolist()))
