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
from outblas.kernels.knobs import all_knobs
from outblas.learn.knob_designs.knob_design import Offer
from outblas.learn.knob_policy import KnobPolicy
from outblas.learn.knob_prior import KnobPrior, PriorView
from outblas.learn.knob_view import KnobView, SearchState, Vectors
from outblas.records.recording import Recording
from outblas.records.recording_files import STATUS_CODES


@dataclass(frozen=True)
class KnobSearch:
    """The recorded candidates of one problem and launch option, with their times.

    Attributes:
        problem: the problem.
        gpu: GPU of the recording.
        launch: the launch option.
        vectors: int16[C, knobs], the candidates.
        us: float64[C], microseconds; inf where a candidate failed.
        prior: the candidates as the prior sees them; None for policies without a prior.
    """

    problem: Problem
    gpu: Gpu
    launch: Launch
    vectors: Vectors
    us: NDArray[np.float64]
    prior: PriorView | None = None


def knob_searches(
    recording: Recording, problems: Sequence[Problem], prior: KnobPrior | None = None
) -> list[KnobSearch]:
    """Return a search per problem and launch option that has a proven cell, in the order of ``problems``.

    Args:
        recording: the recording.
        problems: recorded problems.
        prior: that of the policies to judge; None if they have none.

    Raises:
        UsageError: a problem was not recorded.
    """
    view, found = KnobView(all_knobs()), []
    vectors = np.stack([view.encode(without_launch(config)) for config in recording.catalogue])
    for problem in problems:
        row = recording.row(problem)
        for launch, cells in recording.by_launch(problem).items():
            passed = recording.status[row, cells] == STATUS_CODES[Status.PASSED]
            if passed.any():
                us = np.where(passed, recording.median_us[row, cells].astype(np.float64), np.inf)
                configs = [recording.catalogue[i] for i in cells]
                seen = None if prior is None else prior.view(problem, configs, recording.gpu)
                found.append(KnobSearch(problem, recording.gpu, launch, vectors[cells], us, seen))
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
        believed = None
        if policy.prior is not None and search.prior is not None:
            proven = [i for i in tried if np.isfinite(search.us[i])]
            believed = search.prior.believed(proven, list(np.log(search.us[proven])))[left]
        (chosen,) = policy.order(Offer(state, search.vectors, left, believed), 1)
        tried.append(chosen)
        left = left[left != chosen]
    return np.minimum.accumulate(search.us[tried])


def search_state(about: NDArray[np.float32], launch: Launch, vectors: Vectors, us: NDArray[np.float64]) -> SearchState:
    """Return the state of a search after some measurements.

    Args:
        about: features of the problem, float32[15].
        launch: the launch option.
        vectors: int16[n, knobs], the measured candidates in order.
        us: float64[n], their times, microseconds; inf where one failed.
    """
    proven = np.isfinite(us)
    if not proven.any():
        return SearchState(about, launch, len(us))
    best, last = int(us.argmin()), float(us[proven][-1])
    return SearchState(about, launch, len(us), vectors[best], float(np.log(last / us[best])))
