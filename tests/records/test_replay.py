from __future__ import annotations

import math

import numpy as np
import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas_lab.recordings.recording import STATUSES
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator, standard_error
from support.helpers import synthetic_recording

RECORDING = synthetic_recording()
REPLAY = ReplayEvaluator(RECORDING)


def test_the_candidates_are_the_recorded_cells() -> None:
    for problem in RECORDING.problems:
        offered = [c for c, yes in zip(RECORDING.catalogue, RECORDING.recorded_mask(problem), strict=True) if yes]
        assert list(REPLAY.candidates(problem)) == offered


def test_every_offered_cell_is_answered_as_recorded() -> None:
    seen = set()
    for row, problem in enumerate(RECORDING.problems):
        pairs = [(problem, config) for config in REPLAY.candidates(problem)]
        for (_, config), evaluation in zip(pairs, REPLAY.evaluate(pairs), strict=True):
            column = RECORDING.catalogue.index(config)
            assert (evaluation.problem, evaluation.config) == (problem, config)
            assert evaluation.status is STATUSES[RECORDING.status[row, column]]
            assert evaluation.baselines_us == REPLAY.baselines(problem)
            seen.add(evaluation.status)
            if evaluation.status is Status.PASSED:
                assert evaluation.timing is not None and evaluation.speedup is not None
                assert evaluation.timing.median_us == RECORDING.median_us[row, column]
                name, us = RECORDING.best_baseline(problem)
                assert evaluation.speedup.baseline == name
                assert evaluation.speedup.ratio == us / evaluation.timing.median_us
                assert evaluation.speedup.low < evaluation.speedup.ratio < evaluation.speedup.high
    assert {Status.PASSED, Status.WRONG, Status.FAULT} <= seen


@pytest.mark.parametrize("status", [Status.LEFT_OUT, Status.ILLEGAL])
def test_a_cell_that_was_not_recorded_is_refused(status: Status) -> None:
    row, column = np.argwhere(RECORDING.status == STATUS_CODES[status])[0]
    with pytest.raises(UsageError, match="not recorded"):
        REPLAY.evaluate([(RECORDING.problems[row], RECORDING.catalogue[column])])


def test_a_config_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(UsageError, match="not recorded"):
        REPLAY.evaluate([(RECORDING.problems[0], Sm80MmaConfig(256, 256))])


def test_a_problem_outside_the_recording_is_refused() -> None:
    with pytest.raises(UsageError, match="not in the recording"):
        REPLAY.candidates(Problem(8, 8, 8))


def test_the_interval_covers_a_simulated_median_ratio() -> None:
    """Figure out the spread of the log ratio of two medians by simulation; the formula must agree."""
    rng = np.random.default_rng(0)
    rounds, sigma = 31, 0.05
    ours = np.median(rng.normal(1, sigma, (20000, rounds)), axis=1)
    theirs = np.median(rng.normal(1, sigma, (20000, rounds)), axis=1)
    seen = float(np.std(np.log(theirs / ours)))
    said = math.hypot(*[standard_error(1.349 * sigma, rounds)] * 2)
    assert said == pytest.approx(seen, rel=0.03)


def test_it_says_where_the_figures_come_from() -> None:
    assert (REPLAY.source, REPLAY.gpu.name) == ("replay:h200", "h200")
    assert REPLAY.baseline_detail(RECORDING.problems[3], "lt_auto") == "algo 3"
