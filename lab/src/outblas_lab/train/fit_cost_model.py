"""Fit the ranking model to measured rows.

The fits give its coefficients (:mod:`outblas.kernels.cost.cost_model`) and its ridge regression
(:mod:`outblas.kernels.cost.cost_model`). All families are fitted together, in log space, by Levenberg-Marquardt on
robustly weighted residuals. The mean residual of a problem's cells counts little, because the model only ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import columns_by_family
from outblas.records.store import Store
from outblas_lab.recordings.recording import Recording


@dataclass(frozen=True)
class MeasuredRow:
    """The measured cells of one problem from one source.

    Attributes:
        times: microseconds per call, float64, one of each config.
    """

    source: str
    problem: Problem
    configs: tuple[KernelConfig, ...]
    times: np.ndarray


def measured_row(source: str, problem: Problem, times: Mapping[KernelConfig, float]) -> MeasuredRow:
    """Return the row of some times, in the mapping's order. Times that are nan, inf, 0 or negative are left out.

    Args:
        times: kernel -> microseconds. If none is left, the row is empty.
    """
    kept = {c: t for c, t in times.items() if np.isfinite(t) and t > 0}
    return MeasuredRow(source, problem, tuple(kept), np.array(list(kept.values()), dtype=float))


def rows_of_recording(
    recording: Recording, name: str, problems: Collection[Problem] | None = None
) -> list[MeasuredRow]:
    """Return one row per recorded problem, without cells that have no time. A row may be empty.

    Args:
        problems: the problems to keep. None: all.
    """
    return [
        measured_row(name, p, dict(zip(recording.catalogue, times, strict=True)))
        for p, times in zip(recording.problems, recording.median_us, strict=True)
        if problems is None or p in problems
    ]


def launch_masks(configs: Iterable[KernelConfig]) -> list[np.ndarray]:
    """Return masks bool[len(configs)]: first of the configs without PDL, then of those with it.

    An empty mask is left out, so there are 0 to 2.
    """
    pdl = np.array([c.pdl for c in configs], dtype=bool)
    return [mask for mask in (~pdl, pdl) if mask.any()]


#: Cells count by the square of (best of their launch option / their time), but no less than this: the model is to rank
#: the front.
FAR_WEIGHT = 0.05
#: Log residual beyond which a cell pulls with constant force (Huber).
HUBER = 0.06
#: Share of the mean residual of a problem that is taken off its cells' before they count.
CENTRED_SHARE = 0.9
#: Pull of every coefficient, in log, towards its start: keeps what the data do not determine sane.
#: (The cells of one problem weigh 1 together.)
PRIOR_WEIGHT = 3e-3

Coefficients = dict[str, dict[str, float]]


@dataclass(frozen=True)
class FitColumns:
    """Cells of one family as columns for the formula.

    Attributes:
        where: int[cells of the family], their places among all cells.
        problem: name -> column of the problem's quantities, one value per cell.
        config: name -> column of the kernel's quantities, one value per cell.
    """

    where: np.ndarray
    problem: dict[str, np.ndarray]
    config: dict[str, np.ndarray]


@dataclass(frozen=True)
class FitCells:
    """All cells of a fit, row after row.

    Attributes:
        row: int[cells], the number of each cell's row.
        log_times: float64[cells], natural logs of microseconds.
        weights: float64[cells]; those of one row sum to 1.
    """

    row: np.ndarray
    log_times: np.ndarray
    weights: np.ndarray
    families: dict[str, FitColumns]

    def centred(self, values: np.ndarray) -> np.ndarray:
        """Return ``values`` less 0.9 of the weighted mean of their row, in the same shape.

        Args:
            values: [cells] or [cells, any].
        """
        weighted = values * (self.weights if values.ndim == 1 else self.weights[:, None])
        mean = np.add.reduceat(weighted, np.flatnonzero(np.diff(self.row, prepend=-1)), axis=0)
        return np.asarray(values - CENTRED_SHARE * mean[self.row])


def fit(rows: Sequence[MeasuredRow], gpu: Gpu, steps: int = 60) -> Coefficients:
    """Return family -> coefficient name -> value, fitted to the rows.

    The fit is damped Gauss-Newton with numeric derivatives, in logarithms. A family without cells keeps the start
    values.
    """
    cells = _cells(rows, gpu)
    rough = cost_model.start_coefficients(gpu)
    names = [(family, name) for family, own in rough.items() for name in own]
    start = np.log([rough[family][name] for family, name in names])

    def predicted(x: np.ndarray, family: str) -> np.ndarray:
        own = {name: np.exp(v) for (f, name), v in zip(names, x, strict=True) if f == family}
        columns = cells.families[family]
        return np.log(cost_model.time_us(own, family, columns.problem, columns.config, gpu))

    def residuals(x: np.ndarray) -> np.ndarray:
        out = -cells.log_times
        for family, columns in cells.families.items():
            out[columns.where] += predicted(x, family)
        return out

    def jacobian(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(cells.row), len(names)))
        for family, columns in cells.families.items():
            here = predicted(x, family)
            for i in (i for i, (f, _) in enumerate(names) if f == family):
                step = np.where(np.arange(len(names)) == i, 1e-4, 0.0)
                out[columns.where, i] = (predicted(x + step, family) - here) / 1e-4
        return cells.centred(out)

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(r)
        huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(np.sum(cells.weights * huber) + PRIOR_WEIGHT * np.sum((x - start) ** 2) / 2)

    x, damping = start.copy(), 1e-2
    r = cells.centred(residuals(x))
    best = cost(r, x)
    for _ in range(steps):
        slopes = jacobian(x)
        weighted = slopes * (cells.weights * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12)))[:, None]
        hessian = slopes.T @ weighted + PRIOR_WEIGHT * np.eye(len(names))
        gradient = weighted.T @ r + PRIOR_WEIGHT * (x - start)
        before = best
        while damping < 1e6:
            step = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial = x + np.clip(step, -0.7, 0.7)
            r_trial = cells.centred(residuals(trial))
            if (value := cost(r_trial, trial)) < best:
                x, r, best, damping = trial, r_trial, value, max(damping / 4, 1e-6)
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    found: Coefficients = {family: {} for family in rough}
    for (family, name), value in zip(names, np.exp(x), strict=True):
        found[family][name] = float(value)
    return found


def _cells(rows: Sequence[MeasuredRow], gpu: Gpu) -> FitCells:
    parts: dict[str, list[tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]]] = {}
    offset = 0
    for row in rows:
        shape = cost_model.problem_columns(row.problem, gpu)
        for family, mine, columns in columns_by_family(row.configs, gpu):
            same = {k: np.full(len(mine), v) for k, v in shape.items()}
            parts.setdefault(family, []).append((offset + mine, same, columns))
        offset += len(row.configs)

    def join(columns: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}

    families = {
        family: FitColumns(np.concatenate([p[0] for p in some]), join([p[1] for p in some]), join([p[2] for p in some]))
        for family, some in parts.items()
    }
    number = np.repeat(np.arange(len(rows)), [len(r.times) for r in rows])
    times, weights = (np.concatenate(v) for v in ([r.times for r in rows], [_weights(r) for r in rows]))
    return FitCells(number, np.log(times), weights, families)


def _weights(row: MeasuredRow) -> np.ndarray:
    weights = np.empty(len(row.times))
    for mask in launch_masks(row.configs):
        front = np.maximum(np.square(row.times[mask].min() / row.times[mask]), FAR_WEIGHT)
        weights[mask] = front / front.sum()
    return weights / weights.sum()


#: Pull of every coefficient to zero (the cells of one problem weigh 1 together, features are of order one).
RIDGE_WEIGHT = 0.03
#: Cells count by the fourth power of (best of their problem / their time), but no less than this.
RESIDUAL_FAR_WEIGHT = 0.02
#: Share of the mean of a problem that is taken off its cells' before they count: the model is to rank.
RESIDUAL_CENTRED_SHARE = 0.9
#: Logarithms beyond which a cell is another story than a factor.
MAX_LOG_FACTOR = 0.25


def fit_residual(rows: Sequence[MeasuredRow], coefficients: Mapping[str, Mapping[str, float]], gpu: Gpu) -> np.ndarray:
    """Return the residual's coefficients, in the order of :data:`outblas.kernels.cost.cost_model.FEATURE_NAMES`.

    They are fitted to log(measured / formula), less 0.9 of its weighted mean within each problem. The fit is a ridge
    regression.
    """
    size = len(cost_model.FEATURE_NAMES)
    hessian, gradient = RIDGE_WEIGHT * np.eye(size), np.zeros(size)
    for row in rows:
        weights = np.maximum((row.times.min() / row.times) ** 4, RESIDUAL_FAR_WEIGHT)
        weights = weights / weights.sum()
        left = np.log(row.times / cost_model.predict_with(coefficients, None, row.problem, row.configs, gpu))
        left = np.clip(left - RESIDUAL_CENTRED_SHARE * (weights @ left), -MAX_LOG_FACTOR, MAX_LOG_FACTOR)
        shape, found = cost_model.problem_columns(row.problem, gpu), np.zeros((len(row.configs), size))
        for family, mine, columns in columns_by_family(row.configs, gpu):
            found[mine] = cost_model.residual_features(family, shape, columns, gpu.sms)
        found = found - RESIDUAL_CENTRED_SHARE * (weights @ found)
        hessian += (found * weights[:, None]).T @ found
        gradient += (found * weights[:, None]).T @ left
    return np.asarray(np.linalg.solve(hessian, gradient))


#: Runs of a store lie minutes apart, and clocks drift. The first number is the share of the baselines' log drift that
#: the kernels show, too; the second is the largest plausible drift. Both come from a regression over 3,600 pairs of
#: problem and launch option with two runs. The share was 0.85 below 5 us, 0.3 from 5 to 40 us and 0.65 above.
DRIFT_SHARE, DRIFT_LIMIT = 0.6, 0.15


def rows_of_store(path: Path) -> list[MeasuredRow]:
    """Return one row per problem of a store that has a time. Times of all runs are brought to the clock of the oldest.

    A config that several runs timed has the time of the most rounds. A missing store is created and gives no row.

    Raises:
        RecordError: the store cannot be read.
    """
    with Store(path) as store:
        runs = {run.run_id: list(store.evaluations(run.run_id)) for run in store.runs()}
    found: dict[Problem, dict[str, list[Evaluation]]] = {}
    for run_id, evaluations in runs.items():
        for e in evaluations:
            if e.timing is not None:
                found.setdefault(e.problem, {}).setdefault(run_id, []).append(e)
    return [measured_row(path.stem, p, _together(list(of_runs.values()))) for p, of_runs in found.items()]


def _together(runs: Sequence[Sequence[Evaluation]]) -> dict[KernelConfig, float]:
    """Times of one problem in several runs, oldest first; of a config in two runs the time of more rounds."""
    times: dict[KernelConfig, float] = {}
    rounds: dict[KernelConfig, int] = {}
    for run in runs:
        slower = np.exp(DRIFT_SHARE * clock_drift(runs[0][0].baselines_us, run[0].baselines_us))
        for e in run:
            if e.timing is not None and len(e.timing.samples_us) > rounds.get(e.template, 0):
                rounds[e.template], times[e.template] = len(e.timing.samples_us), e.timing.median_us / slower
    return times


def clock_drift(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the natural log of how much slower the baselines became, clipped to [-0.15, 0.15].

    It is the median over the baselines in both; 0.0 without a common one.

    Args:
        before: baseline -> microseconds in the old run.
        after: baseline -> microseconds in the new run.
    """
    both = [np.log(after[name] / before[name]) for name in before if name in after]
    return float(np.clip(np.median(both), -DRIFT_LIMIT, DRIFT_LIMIT)) if both else 0.0
