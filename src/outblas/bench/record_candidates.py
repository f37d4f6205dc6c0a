"""Choose each problem's own candidates for a recording: some at random, the rest as the cost model ranks them.

Random candidates are a sample of all legal ones, so a learner also sees kernels that the model believes to be slow.
The model's first ones hold the best kernels, which a random sample would rarely contain.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.legality import why_illegal


@dataclass(frozen=True)
class CandidateDraw:
    """Number and kind of each problem's candidates.

    Attributes:
        count: candidates of a problem; all legal ones if they are fewer.
        random: number of them that are drawn from all legal ones, each as likely.

    Raises:
        UsageError: ``count`` is below 1, or ``random`` is not from 0 to ``count``.
    """

    count: int
    random: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"{self.count} candidates", "1 or more", "pass a larger --candidates")
        if not 0 <= self.random <= self.count:
            raise UsageError(f"{self.random} random ones of {self.count} candidates", "0 to all", "correct --random")


def choose_candidates(
    problem: Problem, catalogue: Sequence[KernelConfig], gpu: Gpu, draw: CandidateDraw
) -> dict[KernelConfig, str]:
    """Return candidate -> ``random`` or ``model``, the way in which it was chosen; random ones come first.

    The draw depends on the seed, the problem and the legal candidates alone. The model's part has the candidates that
    it predicts to be fastest, without those that were drawn. Launch options take turns in it, because each has a best
    kernel of its own.

    Args:
        catalogue: the candidates to choose from, legal ones or not.
    """
    legal = [config for config in catalogue if why_illegal(problem, config, gpu) is None]
    rng = random.Random(f"{draw.seed}/{problem.key}")
    drawn = rng.sample(legal, min(draw.random, len(legal)))
    taken = set(drawn)
    others = [config for config in legal if config not in taken]
    ranked = _ranked_in_turns(problem, others, gpu)[: draw.count - len(drawn)]
    return dict.fromkeys(drawn, "random") | dict.fromkeys(ranked, "model")


def _ranked_in_turns(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the configs by their place among those of their launch option, fastest prediction first."""
    times = predict_many(problem, configs, gpu) if configs else np.empty(0)
    seen: Counter[str] = Counter()
    places: dict[KernelConfig, tuple[int, int]] = {}
    for config in (configs[i] for i in np.argsort(times, kind="stable")):
        launch = launch_of(config)
        places[config] = seen[launch], LAUNCHES.index(launch)
        seen[launch] += 1
    return sorted(places, key=places.__getitem__)
