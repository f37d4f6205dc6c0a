"""A replay for the published reward: its answers carry an L2 hit rate, and some kernels are faulty if that is asked."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from outblas.core.config import Candidate, KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas.kernels.catalogue import with_launch
from outblas.kernels.cost.cost_model import modelled_hit_rates
from outblas.learn.reward import CLAIMED_SPEED, HIT_RATE
from outblas.records.recording import Recording
from outblas.records.replay import ReplayEvaluator

#: Speed that a faulty kernel claims, over its recorded speed: that of a kernel that leaves out a quarter of K.
FAULT_SPEED = 4 / 3


@dataclass(frozen=True)
class Faults:
    """Kernels that are injected as faulty: wrong on every problem, and faster than the right kernel.

    Attributes:
        share: share of the kernels, 0 to below 1. 0: none.
        seed: seed of the draw. A kernel with and without PDL is one kernel in the draw.
    """

    share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise UsageError(f"a share of faulty kernels of {self.share:g}", "0 to below 1", "e.g. --faulty 0.05")

    def has(self, config: KernelConfig) -> bool:
        """Return True if the kernel is faulty."""
        if not self.share:
            return False
        name = config_name(with_launch(config, "plain"))
        return random.Random(f"{self.seed}/{name}").random() < self.share


@dataclass(frozen=True)
class RecipeCells:
    """Additions of the recipe to a recording.

    Attributes:
        faults: the injected faults.
        measured: (problem, kernel) -> measured L2 hit rate, 0 to 1. The traffic model gives the others.
    """

    faults: Faults = Faults()
    measured: Mapping[tuple[Problem, KernelConfig], float] = field(default_factory=dict)


class RecipeEvaluator(ReplayEvaluator):
    """Answers from a recording, with an L2 hit rate in every evaluation.

    A faulty kernel has status ``wrong`` and no time. Counter ``unproven_speedup`` then has the speed over cuBLAS that
    it claims: 4/3 of the recorded one.

    Args:
        cells: measured hit rates, and faults.
    """

    def __init__(self, recording: Recording, cells: RecipeCells) -> None:
        super().__init__(recording)
        self._cells = cells
        self._faulty = [cells.faults.has(config) for config in recording.catalogue]
        self._modelled: dict[Problem, dict[KernelConfig, float]] = {}

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> list[Evaluation]:
        """Return the evaluations of the pairs, in their order.

        Raises:
            UsageError: a pair was not recorded.
        """
        return [self._completed(evaluation) for evaluation in super().evaluate(pairs)]

    def hit_rate(self, problem: Problem, config: KernelConfig) -> float:
        """Return the L2 hit rate of a recorded cell, 0 to 1: the measured one, else the modelled one."""
        measured = self._cells.measured.get((problem, config))
        if measured is not None:
            return measured
        if problem not in self._modelled:
            offered = self.candidates(problem)
            self._modelled[problem] = dict(
                zip(offered, modelled_hit_rates(problem, offered, self.gpu).tolist(), strict=True)
            )
        return self._modelled[problem][config]

    def _completed(self, evaluation: Evaluation) -> Evaluation:
        config = evaluation.template
        counters = {HIT_RATE: self.hit_rate(evaluation.problem, config)}
        column = self.recording.catalogue_index(config)
        if evaluation.timing is None or column is None or not self._faulty[column]:
            return replace(evaluation, counters=counters)
        # Only the catalogue's kernels are faulty; the claim is over cuBLAS, or over the fastest if that was not timed.
        cublas = evaluation.baselines_us.get("cublas", min(evaluation.baselines_us.values()))
        counters[CLAIMED_SPEED] = FAULT_SPEED * cublas / evaluation.timing.median_us
        return replace(
            evaluation, status=Status.WRONG, detail="injected fault", verdict=Verdict(Status.WRONG), timing=None,
            speedup=None, counters=counters,
        )  # fmt: skip


def measured_cells(recording: Recording, cells: RecipeCells) -> list[tuple[float, float]]:
    """Return (measured, modelled) L2 hit rates of the recorded cells that have a measured one."""
    modelled = RecipeEvaluator(recording, RecipeCells())
    known = set(recording.problems)
    found = []
    for (problem, config), rate in cells.measured.items():
        column = recording.catalogue_index(config)
        if problem in known and column is not None and recording.recorded_mask(problem)[column]:
            found.append((rate, modelled.hit_rate(problem, config)))
    return found


def count_faulty(recording: Recording, faults: Faults) -> int:
    """Return the number of faulty candidates of a recording's catalogue."""
    return int(np.sum([faults.has(config) for config in recording.catalogue]))
