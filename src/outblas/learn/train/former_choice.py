"""The rule for any shape before it knew cuBLASLt's answer, for comparison on the same problems.

It offered the kernels for any shape without PDL, the six that the policy picks. A kernel needed a bound of 1.12, two
deviations below its prediction. Vector products and regular ones above 10 us were left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outblas.core.config import KernelConfig, launch_of
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.learn.any_shape import REGULAR_MULTIPLE
from outblas.learn.policy import Policy
from outblas.learn.train.fit_any_shape import OfferedCells
from outblas.learn.train.held_out_choices import Guess, Rule

FORMER_RULE = Rule(2.0, 1.12, 2.0)
#: Kernels that were looked at, and the floor (us) above which torch computed regular products.
_RANKED, _REGULAR_US = 6, 10.0


def former_cells(cells: Sequence[OfferedCells]) -> list[OfferedCells]:
    """Return the cells that the former fit had: kernels without PDL, and no answer of cuBLASLt."""
    found = []
    for each in cells:
        plain = np.array([launch_of(config) == "plain" for config in each.configs], dtype=bool)
        found.append(_restricted(replace(each, answer=""), plain))
    return [each for each in found if each.configs]


def former_guess(guess: Guess, kernels: frozenset[KernelConfig], policy: Policy) -> Guess:
    """Return the guess with the kernels alone that the former rule looked at, perhaps none.

    Args:
        guess: predictions of nets that were fitted to :func:`former_cells`.
        kernels: the kernels for any shape.
        policy: the packaged policy. It saw the suites, which favours the former rule there.
    """
    cells = guess.cells
    offered = [i for i, config in enumerate(cells.configs) if config in kernels]
    looked_at = np.zeros(len(cells.configs), dtype=bool)
    if offered and not _left_to_torch(cells.problem, cells.gpu):
        ranked = policy.view(cells.problem, [cells.configs[i] for i in offered], cells.gpu).guess
        looked_at[[offered[i] for i in np.argsort(ranked, kind="stable")[:_RANKED]]] = True
    kept = guess.gain[looked_at], guess.deviation[looked_at], guess.needed[looked_at]
    return Guess(_restricted(cells, looked_at), *kept, guess.fold)


def _left_to_torch(problem: Problem, gpu: Gpu) -> bool:
    regular = problem.n % REGULAR_MULTIPLE == 0 and problem.k % REGULAR_MULTIPLE == 0
    return min(problem.m, problem.n) == 1 or problem.k < 8 or (regular and floor_us(problem, gpu) > _REGULAR_US)


def _restricted(cells: OfferedCells, kept: np.ndarray) -> OfferedCells:
    configs = tuple(config for config, keep in zip(cells.configs, kept, strict=True) if keep)
    return replace(cells, configs=configs, gains=cells.gains[kept], fitted=cells.fitted[kept])
