"""A simulated GPU: an evaluator that answers any legal kernel by the cost model, for a training before measurements.

The model has the coefficients from which its fit starts: rough physics, scaled to the GPU by the rates of its record.
Nothing of it was fitted to a recording, so that a comparison on held-out problems holds out everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from outblas.core.config import Candidate, KernelConfig, Launch
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost import cost_model
from outblas.kernels.kernel_space import KernelSpace, kernel_space
from outblas_lab.train.reward import reward

#: Drawn legal kernels of a problem that stand for all of them.
DRAWN_KERNELS = 96
#: Name of the simulated baseline: the fastest of the drawn kernels.
BASELINE = "drawn"


class CostSimulator(Evaluator):
    """Evaluator whose times are the cost model's. The same question has the same answer.

    Args:
        gpu: the simulated GPU.
        space: kernels among which a problem's baseline is drawn. None:
            :func:`outblas.kernels.kernel_space.kernel_space`.
    """

    def __init__(self, gpu: Gpu, space: KernelSpace | None = None) -> None:
        self._gpu, self._space = gpu, space or kernel_space()
        # One order for all problems: most draw the same kernels, whose columns the cost model then knows.
        self._order = np.random.default_rng(0).permutation(len(self._space.members))
        self._drawn = functools.lru_cache(maxsize=4096)(self._draw)

    @property
    def gpu(self) -> Gpu:
        return self._gpu

    @property
    def source(self) -> str:
        return f"model:{self._gpu.name}"

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return every legal member of the space without launch options."""
        return [self._space.members[i] for i in np.flatnonzero(self._space.legal(problem, self._gpu))]

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> list[Evaluation]:
        """Return one evaluation per pair, in their order. Legality is not checked.

        Raises:
            UsageError: a candidate is a free kernel.
        """
        return [self._answer(problem, candidate) for problem, candidate in pairs]

    def baselines(self, problem: Problem) -> dict[str, float]:
        """Return ``{"drawn": microseconds}``: the fastest of 96 drawn legal kernels without launch options."""
        return {BASELINE: self._drawn(problem, "plain")[0]}

    def reward_scale(self, problem: Problem, launch: Launch) -> tuple[float, float]:
        """Return (mean, standard deviation) of the rewards of the 96 drawn legal kernels with a launch option.

        The deviation is at least 0.01.
        """
        return self._drawn(problem, launch)[1:]

    def _draw(self, problem: Problem, launch: Launch) -> tuple[float, float, float]:
        """Return the least time of the drawn kernels, microseconds, and mean and deviation of their rewards."""
        legal = self._space.legal(problem, self._gpu, launch)
        drawn = self._order[legal[self._order]][:DRAWN_KERNELS].tolist()
        configs = [self._space.config(place, launch) for place in drawn]
        us = self._us(problem, configs)
        base = us.min() if launch == "plain" else self._drawn(problem, "plain")[0]
        rewards = [reward(_evaluation(p, c, t, base)) for p, c, t in zip([problem] * len(us), configs, us, strict=True)]
        return float(us.min()), float(np.mean(rewards)), max(0.01, float(np.std(rewards)))

    def _us(self, problem: Problem, configs: Sequence[KernelConfig]) -> np.ndarray:
        return cost_model.predict_with(cost_model.start_coefficients(self._gpu), None, problem, configs, self._gpu)

    def _answer(self, problem: Problem, candidate: Candidate) -> Evaluation:
        if not isinstance(candidate, KernelConfig):
            raise UsageError(f"a {candidate.family} kernel", "a config of a kernel family", "ask a live evaluator")
        return _evaluation(problem, candidate, self._us(problem, [candidate])[0], self._drawn(problem, "plain")[0])


def _evaluation(problem: Problem, config: KernelConfig, us: float, base_us: float) -> Evaluation:
    ratio = base_us / float(us)
    return Evaluation(
        problem, config, Status.PASSED, verdict=Verdict(Status.PASSED), timing=Timing("offline", (), float(us), 0.0),
        baselines_us={BASELINE: base_us}, speedup=Speedup(BASELINE, ratio, ratio, ratio),
    )  # fmt: skip
