"""How good a policy is on recorded problems: quality after every measurement, straight from the matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.config import LAUNCHES, launch_of
from outblas.evaluation import Status
from outblas.policy import Policy, View
from outblas.problem import Problem
from outblas.recording import CODE, Recording


def qualities(policy: Policy, recording: Recording, problems: Sequence[Problem], budget: int) -> NDArray[np.float64]:
    """float64[tasks, budget]: the task's best time over the best found by then, of every problem and launch option.

    The policy measures its highest score every time; cells that failed count as measurements.
    """
    launches = np.array([LAUNCHES.index(launch_of(c)) for c in recording.catalogue])
    out = []
    for problem in problems:
        row = recording.row(problem)
        offered = recording.recorded(problem)
        for launch in range(len(LAUNCHES)):
            cells = np.flatnonzero(offered & (launches == launch))
            passed = recording.status[row, cells] == CODE[Status.PASSED]
            if passed.any():
                us = np.where(passed, recording.median_us[row, cells].astype(np.float64), np.inf)
                view = policy.view(problem, [recording.catalogue[i] for i in cells], recording.gpu)
                found = _search(policy, view, us, min(budget, len(us)))
                out.append(us.min() / np.concatenate([found, np.full(budget - len(found), found[-1])]))
    return np.maximum(np.array(out), 1e-9)


def _search(policy: Policy, view: View, us: NDArray[np.float64], budget: int) -> NDArray[np.float64]:
    tried: list[int] = []
    for _ in range(budget):
        proven = [i for i in tried if np.isfinite(us[i])]
        scores = policy.scores(view, tried, proven, [float(np.log(us[i])) for i in proven])
        tried.append(int(scores.argmax()))
    return np.minimum.accumulate(us[tried])
