"""Kernel Tuner's search strategies as agents.

Kernel Tuner (van Werkhoven, 2019, doi:10.1016/j.future.2018.08.004) runs a strategy to its end and measures each config
on request. An agent is asked step by step and must repeat its answers. So every proposal runs the strategy from its
start, with equal seeds. The history answers the measured configs; the first configs beyond it are the proposal.

To propose several at once, an unmeasured config is answered with the median of the measured costs, and the run goes on.
This is a constant liar (Ginsbourger et al., 2010, doi:10.1007/978-3-642-10701-6_6).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.kernel_tuner.knob_space import Point, need_kernel_tuner, point, tunable, varying

#: Largest number of questions in a run: a strategy may repeat measured configs or find no legal neighbour. The rest of
#: the proposal is then drawn at random.
QUESTIONS = 300
#: Individuals of a population: few enough that a budget of a few dozen sees several generations.
POPULATION = 8
#: Threads of a block at most, on every GPU.
MAX_THREADS = 1024


class KernelTunerStrategy(Agent):
    """Base class: one strategy of Kernel Tuner behind the interface of agents.

    Only the offered configs are legal points. Any other config that the strategy asks for gets Kernel Tuner's error
    value and is never proposed.

    If the strategy ends early or asks too often (:data:`QUESTIONS`), the rest of the proposal is random. If at most
    ``n`` candidates are left, all of them are proposed, in random order.

    Attributes:
        strategy: module of ``kernel_tuner.strategies``; a subclass sets it.

    Raises:
        ToolchainMissing: Kernel Tuner is not installed; the constructor raises it.
    """

    strategy: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        need_kernel_tuner()

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        left = unexplored(candidates, history)
        chosen: list[KernelConfig] = []
        if len(left) > n:
            # Of the problem alone, not of the history's length: every run must begin as the one before did.
            chosen = self._asked(candidates, history, n, self.rng(problem, ()).getrandbits(32))
        rest = [config for config in left if config not in chosen]
        return chosen + self.rng(problem, history).sample(rest, min(n - len(chosen), len(rest)))

    def _asked(
        self, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int, seed: int
    ) -> list[KernelConfig]:
        """Return up to ``n`` configs that the strategy asks for and ``history`` lacks, in its order."""
        from kernel_tuner.interface import Options
        from kernel_tuner.util import TuningBudget

        names = varying(candidates)
        config_of = {point(config, names): config for config in candidates}
        known = {point(e.template, names): cost for e, cost in _costs(history)}
        runner = _Runner(config_of, known, n)
        space = _searchspace(candidates, names, runner)
        chosen = dict(self.options, max_fevals=len(candidates))
        if "popsize" in chosen:
            chosen["popsize"] = min(chosen["popsize"], len(candidates))
        options = Options(
            strategy_options=Options(chosen),
            objective=["time"],
            objective_higher_is_better=[False],
            tune_params=space.tune_params,
            restrictions=[],
            budget=TuningBudget(),
            verbose=False,
        )
        with _seeded(seed):  # the first import may draw
            tune = import_module(f"kernel_tuner.strategies.{self.strategy}").tune
        with _seeded(seed), suppress(_Enough):
            tune(space, runner, options)
        return [config_of[one] for one in runner.asked]


class Genetic(KernelTunerStrategy):
    """Kernel Tuner's genetic algorithm.

    A population has 8 individuals (:data:`POPULATION`; Kernel Tuner's default is 26). Generations add no individuals
    once all of them, repeated ones included, are as many as the candidates.
    """

    strategy = "genetic_algorithm"
    options = {"popsize": POPULATION}


class Annealing(KernelTunerStrategy):
    """Kernel Tuner's simulated annealing."""

    strategy = "simulated_annealing"


class DifferentialEvolution(KernelTunerStrategy):
    """Kernel Tuner's differential evolution.

    A population has 8 individuals (:data:`POPULATION`; Kernel Tuner's default is 16 per parameter).
    """

    strategy = "diff_evo"
    options = {"popsize": POPULATION, "popsize_times_dimensions": False}


class BayesianOptimization(KernelTunerStrategy):
    """Kernel Tuner's Bayesian optimization: expected improvement by a Gaussian process over the knobs.

    The first 8 configs are drawn (:data:`POPULATION`; Kernel Tuner's default is 20). Its default acquisition depends on
    the host's speed, and its Latin hypercube has a seed of its own. So both are replaced.
    """

    strategy = "bayes_opt"
    options = {"popsize": POPULATION, "method": "ei", "samplingmethod": "random"}


class _Enough(Exception):
    """Raised to end a strategy's run: it has asked for enough configs, or asked too often."""


class _Runner:
    """Answer a strategy's questions, with the interface of ``kernel_tuner.runners.runner.Runner``.

    Attributes:
        asked: points to propose, in the order of the questions.
        dev: properties of the GPU that Bayesian optimization reads.
    """

    def __init__(self, legal: Mapping[Point, KernelConfig], known: Mapping[Point, float | None], n: int) -> None:
        self.points, self._known, self._n = legal, known, n
        costs = [cost for cost in known.values() if cost is not None]
        self._lie = median(costs) if costs else 1.0
        self._questions = 0
        self.dev = SimpleNamespace(max_threads=MAX_THREADS)
        self.asked: list[Point] = []

    def add_strategy_time(self, seconds: float) -> None:
        """Ignore the time that the strategy took; Kernel Tuner reports it here."""

    def legal(self, values: Sequence[Any]) -> bool:
        self._count()
        return tuple(values) in self.points

    def run(self, points: Sequence[Sequence[Any]], options: Any) -> list[dict[str, Any]]:
        """Return one result per point: with ``time``, or with ``__error__`` if the config failed or is not offered."""
        self._count(max(1, len(points)))
        return [self._answer(tuple(one), options) for one in points]

    def _answer(self, at: Point, options: Any) -> dict[str, Any]:
        from kernel_tuner.util import InvalidConfig, RuntimeFailedConfig

        result: dict[str, Any] = dict(zip(options.tune_params, at, strict=True))
        if at not in self.points:
            return {**result, "__error__": InvalidConfig()}
        if at not in self._known:
            if at not in self.asked:
                self.asked.append(at)
                if len(self.asked) == self._n:
                    raise _Enough
            return {**result, "time": self._lie}
        cost = self._known[at]
        return {**result, "__error__": RuntimeFailedConfig()} if cost is None else {**result, "time": cost}

    def _count(self, questions: int = 1) -> None:
        self._questions += questions
        if self._questions > QUESTIONS:
            raise _Enough


def _costs(history: Sequence[Evaluation]) -> Iterator[tuple[Evaluation, float | None]]:
    """Yield each evaluation with its cost, or None if it failed.

    The cost is the time over the baseline's time if every passed evaluation has a baseline, else microseconds.
    """
    paired = all(e.speedup is not None for e in history if e.status is Status.PASSED)
    for e in history:
        if e.timing is None:
            yield e, None
        else:
            yield e, 1 / e.speedup.ratio if paired and e.speedup is not None else e.timing.median_us


def _searchspace(candidates: Sequence[KernelConfig], names: Sequence[str], runner: _Runner) -> Any:
    """Return a new ``Searchspace`` of exactly the candidates, in which every strategy is reproducible.

    It is new each time, since it remembers the neighbours that it returned. It is built from a list, since the product
    of all knob values (some 10^11) cannot be filtered.
    """
    from kernel_tuner.searchspace import Searchspace

    listed = {str(i): dict(zip(names, point(c, names), strict=True)) for i, c in enumerate(candidates)}
    space = Searchspace(None, None, None, from_cache={"tune_params": tunable(candidates, names), "cache": listed})
    # Counted: some strategies draw until they find a legal point.
    space.is_param_config_valid = runner.legal
    # A Latin hypercube draws from a generator of its own that cannot be seeded.
    space.get_LHS_sample = space.get_random_sample
    return space


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of ``random`` and numpy, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        # Failed configs cost the largest float, and differences of such costs overflow to what they should be.
        with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
