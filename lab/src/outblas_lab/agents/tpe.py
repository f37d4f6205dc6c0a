"""Optuna's tree-structured Parzen estimator over the knobs of the candidates that are offered."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation, Status
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.agents.evolution import KNOBS
from outblas_lab.train.reward import reward

#: Proposals drawn at random before the estimator is asked. Optuna's default is 10, for much larger budgets.
STARTUP = 6
_FAMILY = "family"
#: Value of a knob that a family does not have.
_ABSENT = "-"


class Tpe(Agent):
    """Tree-structured Parzen estimator (Optuna) over the knobs.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011. The first 6 proposals of a problem
    (:data:`STARTUP`) are random. The estimator is multivariate; every knob is a category. The family is a knob, too,
    and a knob that a family lacks has a value of its own.

    A suggested point need not be offered: the untried candidate with the fewest different knobs is proposed, and the
    seed breaks ties. Every proposal builds a new study from the history, so that a resumed run asks the same. Points
    suggested in one batch count as running (Optuna's ``constant_liar``). The objective is the reward
    (:mod:`outblas_lab.train.reward`).
    """

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Return configs as :meth:`Agent.propose` does.

        Raises:
            ToolchainMissing: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError as error:
            raise ToolchainMissing("Optuna is not installed", "the package optuna", install_hint("rl")) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # a line per trial otherwise
        rng = self.rng(problem, history)
        left = unexplored(candidates, history)
        rng.shuffle(left)  # the first of equally near ones is proposed
        chosen = left[: max(0, min(n, STARTUP - len(history)))]
        left = left[len(chosen) :]
        if len(left) <= n - len(chosen):
            return chosen + left
        space = _space([*candidates, *(e.template for e in history)])
        study = _study(optuna, space, history, rng.getrandbits(32)) if len(chosen) < n else None
        points = [_point(config) for config in left]
        while study is not None and len(chosen) < n:
            index = _nearest(study.ask(space).params, points)
            points.pop(index)
            chosen.append(left.pop(index))
        return chosen


@functools.cache
def _knob_class() -> Any:
    from optuna.distributions import CategoricalDistribution

    class KnobCategories(CategoricalDistribution):  # type: ignore[misc]
        """Never changed, so never copied: Optuna copies and compares the categories of all knobs for every trial, which
        would take most of a proposal's time."""

        def __deepcopy__(self, memo: object) -> KnobCategories:
            return self

        def __eq__(self, other: object) -> bool:
            return self is other or bool(super().__eq__(other))

        __hash__ = CategoricalDistribution.__hash__

    return KnobCategories


@functools.lru_cache(maxsize=16384)
def _point(config: KernelConfig) -> dict[str, Any]:
    return {_FAMILY: config.family, **{name: getattr(config, name, _ABSENT) for name in KNOBS}}


def _space(configs: Iterable[KernelConfig]) -> dict[str, Any]:
    """Return the categories of every knob with more than one value among ``configs``, in order of first occurrence."""
    values: dict[str, dict[Any, None]] = {}
    for config in configs:
        for name, value in _point(config).items():
            values.setdefault(name, {}).setdefault(value)
    return {name: _knob_class()(tuple(found)) for name, found in values.items() if len(found) > 1}


def _study(optuna: Any, space: Mapping[str, Any], history: Sequence[Evaluation], seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some options are marked as experimental, in some versions
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for evaluation in history:
        if evaluation.status is Status.LEFT_OUT:
            continue
        point = {name: value for name, value in _point(evaluation.config).items() if name in space}
        study.add_trial(optuna.trial.create_trial(params=point, distributions=dict(space), value=reward(evaluation)))
    return study


def _nearest(suggested: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the first of ``points`` that differs from ``suggested`` in the fewest knobs."""
    return min(range(len(points)), key=lambda i: sum(points[i][name] != value for name, value in suggested.items()))
