"""Quality of a policy on recorded problems after every measurement, computed from the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train.policy import CandidateView, Policy


@dataclass(frozen=True)
class RecordedSearch:
    """The C recorded candidates of one problem and launch option, as a policy sees them, with their times.

    Attributes:
        view: their features and the regressor's guesses.
        us: float64[C], microseconds; inf where a candidate failed.
    """

    view: CandidateView
    us: NDArray[np.float64]


def recorded_searches(policy: Policy, recording: Recording, problems: Sequence[Problem]) -> list[RecordedSearch]:
    """Return a search per problem and launch option that has a proven cell, in their order.

    Of the policy only the regressor is used. Policies that share one can share the result.

    Raises:
        UsageError: a problem was not recorded.
    """
    found = []
    for problem in problems:
        row = recording.row(problem)
        for cells in recording.by_launch(problem).values():
            passed = recording.status[row, cells] == STATUS_CODES[Status.PASSED]
            if passed.any():
                us = np.where(passed, recording.median_us[row, cells].astype(np.float64), np.inf)
                view = policy.view(problem, [recording.catalogue[i] for i in cells], recording.gpu)
                found.append(RecordedSearch(view, us))
    return found


def search_qualities(policy: Policy, among: Sequence[RecordedSearch], budget: int) -> NDArray[np.float64]:
    """Return float64[searches, budget], in (0, 1]: a search's best recorded time over the best found so far.

    The policy measures its highest score every time; failed cells count as measurements. The value is 1e-9 while every
    measurement failed. A search with fewer cells than the budget repeats its last value.
    """
    out = []
    for search in among:
        order = search_order(policy, search.view, search.us, min(budget, len(search.us)))
        found = np.minimum.accumulate(search.us[order])
        out.append(search.us.min() / np.concatenate([found, np.full(budget - len(found), found[-1])]))
    return np.maximum(np.array(out), 1e-9)


def search_order(policy: Policy, view: CandidateView, us: NDArray[np.float64], budget: int) -> list[int]:
    """Return the indices of the candidates that a policy measures, in order: its highest score every time.

    Args:
        us: float64[C], microseconds; inf where a candidate failed.
        budget: measurements, at most C.
    """
    tried: list[int] = []
    for _ in range(budget):
        proven = [i for i in tried if np.isfinite(us[i])]
        scores = policy.scores(view, tried, proven, [float(np.log(us[i])) for i in proven])
        tried.append(int(scores.argmax()))
    return tried
