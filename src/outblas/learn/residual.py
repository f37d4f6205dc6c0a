"""The ridge regression of :mod:`outblas.model_residual`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outblas import model, model_residual
from outblas.config import KernelConfig
from outblas.learn.rows import Row
from outblas.model_columns import columns_by_family
from outblas.problem import Problem
from outblas.roofline import Gpu

#: Pull of every coefficient to zero (the cells of one problem weigh 1 together, features are of order one).
RIDGE = 0.03
#: Cells count by the fourth power of (best of their problem / their time), but no less than this.
FAR_WEIGHT = 0.02
#: Share of the mean of a problem that is taken off its cells' before they count: the model is to rank.
CENTRED = 0.9
#: Logarithms beyond which a cell is another story than a factor.
LARGEST = 0.25


def fit_residual(rows: Sequence[Row], coefficients: Mapping[str, Mapping[str, float]], gpu: Gpu) -> np.ndarray:
    """Coefficients in the order of ``model_residual.NAMES``, of what the formula leaves within each problem."""
    size = len(model_residual.NAMES)
    hessian, gradient = RIDGE * np.eye(size), np.zeros(size)
    for row in rows:
        weights = np.maximum((row.times.min() / row.times) ** 4, FAR_WEIGHT)
        weights = weights / weights.sum()
        left = np.log(row.times / model.predict_by(coefficients, None, row.problem, row.configs, gpu))
        left = np.clip(left - CENTRED * (weights @ left), -LARGEST, LARGEST)
        found = _features(row.problem, row.configs, gpu)
        found = found - CENTRED * (weights @ found)
        hessian += (found * weights[:, None]).T @ found
        gradient += (found * weights[:, None]).T @ left
    return np.asarray(np.linalg.solve(hessian, gradient))


def _features(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> np.ndarray:
    shape = model.problem_columns(problem, gpu)
    out = np.zeros((len(configs), len(model_residual.NAMES)))
    for family, mine, columns in columns_by_family(configs):
        out[mine] = model_residual.features(family, shape, columns, gpu.sms)
    return out
