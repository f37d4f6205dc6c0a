"""Statistics of a comparison: the quality of each agent after each budget, with intervals; gains between agents.

Quality is averaged by the geometric mean over problems, launch options and seeds. Regret is 1 / mean - 1: how much
slower the found candidate is than the best recorded one. Intervals are percentile bootstraps over problems (Efron &
Tibshirani, An Introduction to the Bootstrap, section 13.3). Launch options and seeds of a problem are drawn together,
since they are not independent. All agents share the drawn problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outblas.core.roofline import Gpu, regime
from outblas_lab.compare.compare_result import Comparison
from outblas_lab.pool.averages import regime_order

RESAMPLES = 2000
#: An agent's overall regret is the mean over the budgets within these.
OVERALL_BUDGETS = (1, 16)


@dataclass(frozen=True)
class Figure:
    """The quality of one agent at one budget.

    Properties: ``regret`` is 1 / quality - 1, ``half_width`` is (high - low) / 2.

    Attributes:
        agent: name of the agent.
        budget: number of measurements.
        quality: geometric mean of the quality, in (0, 1].
        low: lower end of its 95% interval.
        high: upper end.
        found: share of runs that found a kernel that passed, 0 to 1.
    """

    agent: str
    budget: int
    quality: float
    low: float
    high: float
    found: float

    @property
    def regret(self) -> float:
        """1 / quality - 1."""
        return 1 / self.quality - 1

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def overlaps(self, other: Figure) -> bool:
        return self.low <= other.high and other.low <= self.high


def figures(comparison: Comparison, split: str, seed: int = 0) -> dict[tuple[str, int], Figure]:
    """Return (agent, budget) -> figure of one split, for every agent and budget. Intervals come from resampled
    problems.

    Numbers are rounded to 6 decimals. With one problem, low and high equal the quality.

    Args:
        split: name of the split; an unknown one raises ValueError.
        seed: seed of the resampling.
    """
    sums, counts, found = _by_problem(comparison, split)
    problems = sums.shape[1]
    drawn = np.random.default_rng(seed).integers(0, problems, (RESAMPLES, problems))
    weights = np.stack([np.bincount(d, minlength=problems) for d in drawn]).astype(np.float64)
    made = {}
    for i, agent in enumerate(comparison.agents):
        resampled = np.exp((weights @ sums[i]) / (weights @ counts[i]))
        low, high = np.percentile(resampled, (2.5, 97.5), axis=0)
        total = counts[i].sum(axis=0)
        mean, share = np.exp(sums[i].sum(axis=0) / total), found[i].sum(axis=0) / total
        for j, budget in enumerate(comparison.budgets):
            made[agent, budget] = Figure(agent, budget, *(round(float(x[j]), 6) for x in (mean, low, high, share)))
    return made


def best_agents(made: dict[tuple[str, int], Figure], budget: int) -> tuple[Figure, list[Figure]]:
    """Return the figure with the highest quality at a budget, and those of other agents whose intervals overlap its
    own.

    The others are a list, highest quality first. Intervals that touch overlap.

    Args:
        made: figures of one split, see :func:`figures`.
        budget: number of measurements; must be one of the figures', else IndexError is raised.
    """
    ranked = sorted((f for f in made.values() if f.budget == budget), key=lambda f: -f.quality)
    return ranked[0], [f for f in ranked[1:] if f.overlaps(ranked[0])]


def mean_regret(made: dict[tuple[str, int], Figure], agent: str) -> float:
    """Return an agent's mean regret over the budgets from 1 to 16 (:data:`OVERALL_BUDGETS`), or over all if none is
    within.

    The regret is 1 / quality - 1, and the mean is arithmetic. Example: qualities 0.5 at budget 1 and 0.8 at 16 give
    0.625.

    Args:
        made: figures of one split, see :func:`figures`.
        agent: name of the agent, which must have figures.
    """
    mine = [f for f in made.values() if f.agent == agent]
    within = [f for f in mine if OVERALL_BUDGETS[0] <= f.budget <= OVERALL_BUDGETS[1]] or mine
    return sum(f.regret for f in within) / len(within)


def overall_regret(of_splits: Sequence[dict[tuple[str, int], Figure]]) -> list[tuple[str, float]]:
    """Return (agent, mean of :func:`mean_regret` over the splits) as a list, the agent with the smallest regret first.

    Args:
        of_splits: figures of each split, see :func:`figures`; one or more, all with the same agents.
    """
    agents = dict.fromkeys(agent for agent, _ in of_splits[0])
    regrets = {agent: sum(mean_regret(made, agent) for made in of_splits) / len(of_splits) for agent in agents}
    return sorted(regrets.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class Gain:
    """Gain of one agent over another at one budget, on the same problems.

    Attributes:
        budget: number of measurements.
        mean: mean of the log of (its quality / the other's quality); 0.001 is about 0.1% faster.
        low: lower end of its 95% interval, from resampled problems.
        high: upper end.
    """

    budget: int
    mean: float
    low: float
    high: float


def paired_gains(comparison: Comparison, split: str, agent: str, than: str, seed: int = 0) -> list[Gain]:
    """Return the gain of one agent over another for every budget of a split, problem by problem.

    Args:
        split: name of the split.
        agent: name of the agent; an unknown one raises ValueError.
        than: name of the other agent.
        seed: seed of the resampling.
    """
    sums, counts, _ = _by_problem(comparison, split)
    mine, other = (comparison.agents.index(name) for name in (agent, than))
    gains = sums[mine] / counts[mine] - sums[other] / counts[other]
    problems = len(gains)
    drawn = np.random.default_rng(seed).integers(0, problems, (RESAMPLES, problems))
    low, high = np.percentile(gains[drawn].mean(axis=1), (2.5, 97.5), axis=0)
    mean = gains.mean(axis=0)
    return [
        Gain(budget, *(round(float(values[i]), 6) for values in (mean, low, high)))
        for i, budget in enumerate(comparison.budgets)
    ]


def noise_regret(comparison: Comparison) -> float | None:
    """Return the regret of the lowest noise floor of the splits. It hides smaller differences of agents.

    None for a comparison that was made before noise floors were kept.
    """
    floors = [about.get("noise_floor") for about in comparison.meta["splits"].values()]
    return None if None in floors else round(1 / min(floors) - 1, 6)


def regime_qualities(comparison: Comparison, split: str, gpu: Gpu) -> list[tuple[str, int, str, list[float]]]:
    """Return (regime, number of problems, agent, geometric mean of the quality at each budget) of one split.

    Regimes come in order (launch, memory, compute; each by size). Each has a row for every agent, in the comparison's
    order. Means are rounded to 6 decimals.

    Args:
        split: name of the split; an unknown one raises ValueError.
        gpu: GPU that decides the regimes (:func:`outblas.core.roofline.regime`).
    """
    sums, counts, _ = _by_problem(comparison, split)
    held = np.unique(comparison.problem[comparison.split == comparison.splits.index(split)])
    names = np.array([regime(comparison.problems[p], gpu) for p in held])
    rows = []
    for name in sorted(set(names.tolist()), key=regime_order):
        inside = names == name
        for i, agent in enumerate(comparison.agents):
            mean = np.exp(sums[i][inside].sum(axis=0) / counts[i][inside].sum(axis=0))
            rows.append((name, int(inside.sum()), agent, [round(float(q), 6) for q in mean]))
    return rows


def budget_words(budgets: Iterable[int]) -> str:
    """Return the budgets that :func:`mean_regret` averages over, separated by commas.

    Example: ``budget_words([0, 1, 2, 16, 32])`` returns ``"1, 2, 16"``. If none is from 1 to 16, all are named; no
    budgets give ``""``.
    """
    chosen = list(budgets)
    within = [b for b in chosen if OVERALL_BUDGETS[0] <= b <= OVERALL_BUDGETS[1]] or chosen
    return ", ".join(map(str, within))


def _by_problem(
    comparison: Comparison, split: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sums of log quality, rows, and rows that found anything, each of shape (agents, held-out problems, budgets)."""
    inside = comparison.split == comparison.splits.index(split)
    _, problem = np.unique(comparison.problem[inside], return_inverse=True)
    shape = (len(comparison.agents), int(problem.max()) + 1, len(comparison.budgets))
    flat = np.ravel_multi_index((comparison.agent[inside], problem, comparison.budget[inside]), shape)

    def summed(weights: NDArray[np.float64] | None) -> NDArray[np.float64]:
        return np.bincount(flat, weights, int(np.prod(shape))).astype(np.float64).reshape(shape)

    log = np.log(comparison.quality[inside])
    return summed(log), summed(None), summed(comparison.found[inside].astype(np.float64))
