"""The noise floor of a replay: how good a choice is that knows all recorded times, which are noisy themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outblas.records.recording import Recording
from outblas.records.replay import standard_error
from outblas.search.compare.held_out import HeldOutTask

#: Recordings that are drawn for the simulation.
DRAWS = 200


def noise_floor(recording: Recording, tasks: Sequence[HeldOutTask], seed: int = 0) -> float:
    """Return the quality of the choice of the fastest recorded candidate, if recording and truth differ by the noise.

    It is a geometric mean over tasks, below 1. Recorded medians are taken as the truth. Other recordings are drawn
    around them: normal in log time, with the standard error that follows from a cell's spread and rounds. Each
    recording's fastest candidate is then judged by the truth. The recording hides differences of agents above this
    floor.

    Args:
        recording: the recording.
        tasks: tasks of recorded problems, at least one.
        seed: seed of the draws.
    """
    rng, losses = np.random.default_rng(seed), []
    for task in tasks:
        row = recording.row(task.problem)
        columns = [column for c in task.candidates if (column := recording.catalogue_index(c)) is not None]
        passed = [column for column in columns if np.isfinite(recording.median_us[row, column])]
        log_us = np.log(recording.median_us[row, passed].astype(np.float64))
        errors = [
            standard_error(float(recording.spread[row, column]), int(recording.rounds[row, column]))
            for column in passed
        ]
        drawn = log_us + rng.standard_normal((DRAWS, len(passed))) * np.array(errors)
        losses.append(float(np.mean(log_us[drawn.argmin(axis=1)] - log_us.min())))
    return round(math.exp(-float(np.mean(losses))), 6)
