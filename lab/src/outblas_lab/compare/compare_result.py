"""The result file of a comparison, and its statistics: quality of each agent after each budget, gains between agents.

The file is Parquet, one row per (split, agent, seed, problem, launch, budget).
Quality is averaged by the geometric mean over problems, launch options and seeds. Regret is 1 / mean - 1: how much
slower the found candidate is than the best recorded one. Intervals are percentile bootstraps over problems (Efron &
Tibshirani, An Introduction to the Bootstrap, section 13.3). Launch options and seeds of a problem are drawn together,
since they are not independent. All agents share the drawn problems.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.errors import OutblasError, RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, regime
from outblas.records.parquet import column_schema, read_table, write_table
from outblas.records.results import FORMAT, PROVENANCE_FIELDS, read_meta
from outblas_lab.compare.student_t import student_t
from outblas_lab.pool.averages import regime_order

KIND = "compare"
#: Column -> Arrow type. ``quality``: best recorded time of the task / time of the choice after ``budget`` measurements.
#: The choice is the fastest that passed, or the next proposal while none has; with budget 0 it is the first proposal,
#: unmeasured. ``found``: whether the choice passes. One that does not counts as the slowest recorded candidate.
COLUMNS = {
    "split": "string",
    "agent": "string",
    "seed": "int32",
    "problem": "string",
    "launch": "string",
    "budget": "int32",
    "quality": "double",
    "found": "bool",
}
_META = ("agents", "costs", "device", "recording", "seeds", "splits", "suite")
_AGAIN = "restore the file or run `outblas compare --no-resume`"
#: Printed where a table has both numbers of measurements.
FIRST_CHOICE = "after 0 or 1 measurements, an agent's choice is its first proposal, unless that kernel fails"


@dataclass(frozen=True)
class Comparison:
    """A comparison, read and checked: in every split all agents searched the same tasks, with the same budgets.

    The arrays have one element a row. A row is the quality of one agent and seed on one task after one budget.

    Attributes:
        meta: metadata of the file, see :func:`write_comparison`.
        splits: names of the splits; ``split`` holds indices of it.
        agents: names of the agents, in the order to show them; ``agent`` holds indices of it.
        launches: names of the launch options, sorted by name; ``launch`` holds indices of it.
        problems: the problems, sorted by key; ``problem`` holds indices of it.
        budgets: numbers of measurements, ascending; ``budget`` holds indices of it.
        split: int[rows].
        agent: int[rows].
        launch: int[rows].
        problem: int[rows].
        budget: int[rows].
        seed: int[rows], the agent's seed itself.
        quality: float64[rows], in (0, 1]: best recorded time of the task over the time of the choice.
        found: bool[rows], whether the choice after that number of measurements passes.
    """

    path: Path
    meta: dict[str, Any]
    splits: tuple[str, ...]
    agents: tuple[str, ...]
    launches: tuple[str, ...]
    problems: tuple[Problem, ...]
    budgets: tuple[int, ...]
    split: NDArray[np.int64]
    agent: NDArray[np.int64]
    launch: NDArray[np.int64]
    problem: NDArray[np.int64]
    budget: NDArray[np.int64]
    seed: NDArray[np.int64]
    quality: NDArray[np.float64]
    found: NDArray[np.bool_]

    @property
    def provenance(self) -> dict[str, Any]:
        return dict(self.meta["provenance"])

    @property
    def unit(self) -> str:
        """Unit of the budgets: ``measurements`` or ``gpu-ms``."""
        return str(self.meta.get("unit", "measurements"))

    @property
    def measured(self) -> dict[str, Any]:
        """Provenance of the recording."""
        return dict(self.meta["recording"]["provenance"])


def write_comparison(rows: Sequence[Sequence[Any]], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a result file atomically: ``path`` is either the old file or the whole new one. Return its path.

    Args:
        rows: values in the order of :data:`COLUMNS`: split, agent, seed, problem key, launch option, budget, quality,
            found.
        meta: ``provenance``, ``suite``, ``agents`` (in the order to show them), ``splits``, ``seeds``, ``costs``,
            ``device`` and ``recording``; ``format`` and ``kind`` are set here.

    Raises:
        RecordError: there are no rows, the rows contradict themselves or the metadata, a field of ``meta`` is missing,
            or the disk refuses.
    """
    import pyarrow as pa

    path = Path(path)
    full = {**meta, "format": FORMAT, "kind": KIND}
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    table = pa.table(dict(zip(COLUMNS, columns, strict=True)), schema=column_schema(COLUMNS))
    _checked(table, full, path)
    return write_table(table, full, path)


def read_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Read a result file of ``outblas compare``.

    Raises:
        RecordError: it is missing, truncated or damaged, of another kind or format version, lacks a column, or holds
            rows that contradict themselves.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta.get("kind") != KIND:
        raise RecordError(
            f"{path} has kind {meta.get('kind')!r}", f"kind {KIND!r}", "pass a file from `outblas compare`"
        )
    return _checked(read_table(path, COLUMNS, "an undamaged comparison", _AGAIN), meta, path)


def _checked(table: Any, meta: dict[str, Any], path: Path) -> Comparison:
    absent = [name for name in _META if name not in meta]
    absent += [name for name in PROVENANCE_FIELDS if name not in meta.get("provenance", {})]
    if absent:
        raise RecordError(f"{path}: the metadata lacks {', '.join(absent)}", "complete metadata", _AGAIN)
    if not table.num_rows or any(column.null_count for column in table.columns):
        raise RecordError(f"{path} has no rows, or contains a null", "rows without nulls", _AGAIN)
    splits, split = _coded(table["split"], list(meta["splits"]), "split", path)
    agents, agent = _coded(table["agent"], list(meta["agents"]), "agent", path)
    launches, launch = _coded(table["launch"], [], "launch", path)
    keys, problem = _coded(table["problem"], [], "problem", path)
    budgets, budget = np.unique(table["budget"].to_numpy(), return_inverse=True)
    try:
        problems = tuple(Problem.from_key(key) for key in keys)
    except OutblasError as error:
        raise RecordError(f"{path}: {error}", "valid problems", _AGAIN) from error
    comparison = Comparison(
        path, meta, splits, agents, launches, problems, tuple(int(b) for b in budgets),
        split, agent, launch, problem, budget.astype(np.int64), table["seed"].to_numpy().astype(np.int64),
        table["quality"].to_numpy(), table["found"].to_numpy(zero_copy_only=False),
    )  # fmt: skip
    fault = _fault(comparison)
    if fault:
        raise RecordError(f"{path}: {fault}", "a complete comparison", _AGAIN)
    return comparison


def _fault(c: Comparison) -> str | None:
    """Return one line on the first contradiction of the rows; None if they are consistent."""
    if not ((c.quality > 0) & (c.quality <= 1)).all():
        return "a quality is outside (0, 1]"
    cells = (c.problem * len(c.launches) + c.launch) * len(c.budgets) + c.budget
    for i, split in enumerate(c.splits):
        of_split = c.split == i
        tasks = np.unique(cells[of_split] // len(c.budgets))
        wanted = (tasks[:, None] * len(c.budgets) + np.arange(len(c.budgets))).ravel()
        for j, agent in enumerate(c.agents):
            mine = of_split & (c.agent == j)
            if not mine.any():
                return f"agent {agent} was not run on split {split}"
            for seed in np.unique(c.seed[mine]):
                if not np.array_equal(np.sort(cells[mine & (c.seed == seed)]), wanted):
                    return f"agent {agent}, seed {seed}, split {split}: tasks or budgets are missing, extra or repeated"
    return None


def _coded(column: Any, known: list[str], what: str, path: Path) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The names of a column, ``known`` ones in their order, and each row's index into them."""
    values, codes = np.unique(np.array(column.to_pylist(), dtype=object).astype(str), return_inverse=True)
    names = tuple(known) if known else tuple(str(v) for v in values)
    odd = sorted(set(map(str, values)) ^ set(names))
    if odd:
        wrong = f"{path}: {what} {', '.join(odd)} is only in the rows or only in the metadata"
        raise RecordError(wrong, "every name in both", _AGAIN)
    positions = np.array([names.index(str(value)) for value in values], dtype=np.int64)
    return names, positions[codes]


RESAMPLES = 2000
#: An agent's overall regret is the mean over the budgets within these.
OVERALL_BUDGETS = (1, 16)


@dataclass(frozen=True)
class Figure:
    """The quality of one agent at one budget.

    Properties: ``regret`` is 1 / quality - 1, ``half_width`` is (high - low) / 2.

    Attributes:
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
    """Return (agent, budget) -> figure of one split. Intervals come from resampled problems.

    Numbers are rounded to 6 decimals. With one problem, low and high equal the quality.
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
    """Return the figure of the highest quality at a budget, and others whose intervals overlap its own.

    The others are a list, highest quality first. Intervals that touch overlap.

    Args:
        budget: number of measurements; must be one of the figures', else IndexError is raised.
    """
    ranked = sorted((f for f in made.values() if f.budget == budget), key=lambda f: -f.quality)
    best, *others = ranked
    return best, [f for f in others if f.overlaps(best)]


def mean_regret(made: dict[tuple[str, int], Figure], agent: str) -> float:
    """Return an agent's mean regret over the budgets within :data:`OVERALL_BUDGETS`, or all if none is.

    The regret is 1 / quality - 1, and the mean is arithmetic. Example: qualities 0.5 at budget 1 and 0.8 at 16 give
    0.625.
    """
    regrets = [made[agent, budget].regret for budget in overall_budgets(b for one, b in made if one == agent)]
    return sum(regrets) / len(regrets)


def overall_budgets(budgets: Iterable[int]) -> list[int]:
    """Return the budgets within :data:`OVERALL_BUDGETS`, in their order; all if none is."""
    known = list(budgets)
    return [b for b in known if OVERALL_BUDGETS[0] <= b <= OVERALL_BUDGETS[1]] or known


def overall_regret(of_splits: Sequence[dict[tuple[str, int], Figure]]) -> list[tuple[str, float]]:
    """Return (agent, mean of :func:`mean_regret` over the splits) as a list, the agent with the smallest regret first.

    Args:
        of_splits: figures of each split, see :func:`figures`; one or more, all with the same agents.
    """
    agents = dict.fromkeys(agent for agent, _ in of_splits[0])
    regrets = {agent: sum(mean_regret(made, agent) for made in of_splits) / len(of_splits) for agent in agents}
    return sorted(regrets.items(), key=lambda item: item[1])


def level_with(of_splits: Sequence[dict[tuple[str, int], Figure]], best: str) -> list[str]:
    """Return the agents that no interval tells apart from one: those that overlap it at each budget of each split.

    Budgets are those of :func:`mean_regret`. The agents are in the order of the figures.
    """
    budgets = overall_budgets(budget for agent, budget in of_splits[0] if agent == best)
    cells = [(made, budget) for made in of_splits for budget in budgets]
    others = [agent for agent in dict.fromkeys(agent for agent, _ in of_splits[0]) if agent != best]
    return [agent for agent in others if all(made[agent, b].overlaps(made[best, b]) for made, b in cells)]


def seed_half_widths(comparison: Comparison, split: str) -> dict[tuple[str, int], float]:
    """Return (agent, budget) -> half of the 95% interval of the quality over seeds, of agents with two or more.

    Each seed's quality is a geometric mean over all problems. The interval is that of Student's t for their mean.
    """
    inside = comparison.split == comparison.splits.index(split)
    found = {}
    for i, agent in enumerate(comparison.agents):
        mine = inside & (comparison.agent == i)
        seeds = np.unique(comparison.seed[mine])
        for j, budget in enumerate(comparison.budgets):
            at = mine & (comparison.budget == j)
            each = [float(np.exp(np.log(comparison.quality[at & (comparison.seed == s)]).mean())) for s in seeds]
            if len(each) > 1:
                found[agent, budget] = round(
                    student_t(len(each) - 1) * float(np.std(each, ddof=1)) / math.sqrt(len(each)), 6
                )
    return found


@dataclass(frozen=True)
class Gain:
    """Gain of one agent over another at one budget, on the same problems.

    Attributes:
        mean: mean of the log of (its quality / the other's quality); 0.001 is about 0.1% faster.
    """

    budget: int
    mean: float
    low: float
    high: float


def paired_gains(comparison: Comparison, split: str, agent: str, than: str) -> list[Gain]:
    """Return the gain of one agent over another for every budget of a split, problem by problem.

    Args:
        agent: name of the agent; an unknown one raises ValueError.
    """
    sums, counts, _ = _by_problem(comparison, split)
    mine, other = (comparison.agents.index(name) for name in (agent, than))
    gains = sums[mine] / counts[mine] - sums[other] / counts[other]
    problems = len(gains)
    drawn = np.random.default_rng(0).integers(0, problems, (RESAMPLES, problems))
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
    return ", ".join(map(str, overall_budgets(budgets)))


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
