"""Read policies whose inputs described the GPU by five figures, as trainings on one GPU left them.

Such a training saw one value of each figure, so the figures told its networks nothing. The networks get today's
features of the GPU instead, with weight 0. Their proposals stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outblas.predict.features import CANDIDATE_FEATURES, GPU_FEATURES, PROBLEM_FEATURES, Features

#: Names of the GPU's features in an older policy. They stood where :data:`GPU_FEATURES` stand today.
OLDER_GPU_FEATURES = ("gpu_sms", "gpu_l2", "gpu_shared", "gpu_hbm", "gpu_peak")


def older_problem_features() -> tuple[str, ...]:
    """Return the names of the problem's features in an older policy, in their order."""
    first = GPU_FEATURES[0]
    return (*PROBLEM_FEATURES[:first], *OLDER_GPU_FEATURES, *PROBLEM_FEATURES[GPU_FEATURES[-1] + 1 :])


def with_todays_inputs(arrays: Mapping[str, Any], posterior_inputs: int) -> dict[str, Any]:
    """Return the arrays of an older policy's file as arrays of a policy with today's inputs.

    What the scorer made of the GPU's constant features becomes a part of its first bias.

    Args:
        arrays: name -> array of the file, as :meth:`outblas_lab.train.policy.Policy.save` wrote it.
        posterior_inputs: number of a candidate's inputs beside its features.

    Raises:
        ValueError: a feature of the GPU varied in the training, or an array has another shape.
        KeyError: an array is missing.
    """
    first = GPU_FEATURES[0]
    old = slice(first, first + len(OLDER_GPU_FEATURES))
    mean = np.asarray(arrays["mean"])
    if np.any(arrays["scale"][old] != 0):
        raise ValueError("features of the GPU that varied, of an older release")
    found = {
        **arrays,
        "mean": _replaced(mean, old, 0),
        "scale": _replaced(np.asarray(arrays["scale"]), old, 0),
        "regressor_w0": _replaced(np.asarray(arrays["regressor_w0"]), old, 1),
    }
    if "scorer_w0" in arrays:
        before = len(CANDIDATE_FEATURES) + posterior_inputs
        rows = slice(before + old.start, before + old.stop)
        weights = np.asarray(arrays["scorer_w0"])
        found["scorer_w0"] = _replaced(weights, rows, 0)
        found["scorer_b0"] = arrays["scorer_b0"] + mean[old] @ weights[rows]
    return found


def _replaced(array: Features, old: slice, axis: int) -> Features:
    """Return the array with the entries ``old`` of an axis replaced by zeros, one for each of today's features."""
    before, after = np.split(array, [old.start], axis)[0], np.split(array, [old.stop], axis)[1]
    shape = [len(GPU_FEATURES) if i == axis else size for i, size in enumerate(array.shape)]
    return np.concatenate([before, np.zeros(shape, array.dtype), after], axis=axis)
