"""The quality of a knob policy on recorded problems: how soon it finds the best recorded time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import Launch
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.kernel_space import without_launch
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train.knob_choice import Offer
from outblas_lab.train.knob_policy import KnobPolicy
from outblas_lab.train.knob_view import SearchState, Vectors, every_knob


@dataclass(frozen=True)
class KnobSearch:
    """The recorded candidates of one problem and launch option, with their times.

    Attributes:
        gpu: GPU of the recording.
        launch: the launch option.
        vectors: int16[C, knobs], the candidates.
        us: float64[C], microseconds; inf where a candidate failed.
    """

    problem: Problem
    gpu: Gpu
    launch: Launch
    vectors: Vectors
    us: NDArray[np.float64]


def knob_searches(recording: Recording, problems: Sequence[Problem]) -> list[KnobSearch]:
    """Return a search per problem and launch option that has a proven cell, in the order of ``problems``.

    Args:
        problems: recorded problems.

    Raises:
        UsageError: a problem was not recorded.
    """
    view, found = every_knob(), []
    vectors = np.stack([view.encode(without_launch(config)) for config in recording.catalogue])
    for problem in problems:
        row = recording.row(problem)
        for launch, cells in recording.by_launch(problem).items():
            passed = recording.status[row, cells] == STATUS_CODES[Status.PASSED]
            if passed.any():
                us = np.where(passed, recording.median_us[row, cells].astype(np.float64), np.inf)
                found.append(KnobSearch(problem, recording.gpu, launch, vectors[cells], us))
    return found


def knob_search_qualities(policy: KnobPolicy, searches: Sequence[KnobSearch], budget: int) -> NDArray[np.float64]:
    """Return float64[searches, budget]: a search's best recorded time over the best time found so far.

    The policy measures the untried candidate that it puts first every time; failed cells count as measurements. The
    value is 1e-9 while every measurement failed. A search with fewer cells than the budget repeats its last value.
    """
    found = []
    for search in searches:
        times = _searched(policy, search, min(budget, len(search.us)))
        found.append(search.us.min() / np.concatenate([times, np.full(budget - len(times), times[-1])]))
    return np.maximum(np.array(found), 1e-9)


def _searched(policy: KnobPolicy, search: KnobSearch, budget: int) -> NDArray[np.float64]:
    """Return float64[budget]: the best time after each measurement."""
    left, tried = np.arange(len(search.us)), list[int]()
    about = policy.see(search.problem, search.gpu)
    for _ in range(budget):
        state = search_state(about, search.launch, search.vectors[tried], search.us[tried])
        (chosen,) = policy.order(Offer(state, search.vectors, left), 1)
        tried.append(chosen)
        left = left[left != chosen]
    return np.minimum.accumulate(search.us[tried])


def search_state(about: NDArray[np.float32], launch: Launch, vectors: Vectors, us: NDArray[np.float64]) -> SearchState:
    """Return the state of a search after some measurements.

    Args:
        about: features of the problem, float32[19].
        launch: the launch option.
        vectors: int16[n, knobs], the measured candidates in order.
        us: float64[n], their times, microseconds; inf where one failed.
    """
    proven = np.isfinite(us)
    if not proven.any():
        return SearchState(about, launch, len(us))
    best, last = int(us.argmin()), float(us[proven][-1])
    return SearchState(about, launch, len(us), vectors[best], float(np.log(last / us[best])))
