"""A library and its evaluations as result rows: figures only where a kernel is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.roofline import floor_us, regime
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow, choose_kernel
from outblas.records.store import Store
from outblas.tune.tune_folder import result_rows
from outblas_lab.recordings.replay import ReplayEvaluator
from support.helpers import failed_evaluation, passed_evaluation, synthetic_recording

EVALUATOR = ReplayEvaluator(synthetic_recording())
PROBLEM = EVALUATOR.recording.problems[0]
PLAIN = next(c for c in EVALUATOR.recording.catalogue if not c.pdl)
PDL = next(c for c in EVALUATOR.recording.catalogue if c.pdl)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.sqlite") as opened:
        yield opened


def rows_of(store: Store, evaluations: list[Evaluation], baseline: str = "torch") -> list[dict[str, object]]:
    store.extend("run", evaluations)
    row = LibraryRow(
        PROBLEM, baseline, "", "replay:h200", choose_kernel(evaluations, "plain"), choose_kernel(evaluations, "pdl")
    )
    return list(result_rows(Library("h200", (row,)), store, "run", EVALUATOR))


def test_a_winner_carries_the_figures_of_its_evaluation(store: Store) -> None:
    slow, fast = passed_evaluation(PROBLEM, PLAIN, 1.1, 1.2), passed_evaluation(PROBLEM, PDL, 1.3, 1.4)
    plain, pdl = rows_of(store, [slow, fast])
    assert (plain["pdl"], pdl["pdl"]) == (False, True)
    for row, e in ((plain, slow), (pdl, fast)):
        assert e.timing is not None
        assert e.speedup is not None
        assert row["published"] == row["speedup"] == e.speedup.ratio
        assert (row["low"], row["high"], row["fallback"]) == (e.speedup.low, e.speedup.high, False)
        assert (row["ours_us"], row["rounds"], row["repeats"]) == (e.timing.median_us, 3, 32)
        assert row["baseline_us"] == e.baselines_us[str(row["baseline"])]
        assert (row["floor_us"], row["regime"]) == (floor_us(PROBLEM, EVALUATOR.gpu), regime(PROBLEM, EVALUATOR.gpu))


def test_a_fall_back_has_no_figure_of_ours_and_counts_as_one(store: Store) -> None:
    for row in rows_of(store, [failed_evaluation(PROBLEM, PLAIN, Status.WRONG)]):
        assert (row["fallback"], row["published"], row["config"]) == (True, 1.0, "")
        assert not {"ours_us", "speedup", "low", "high"} & row.keys()
        assert row["baseline_us"] == row["torch_us"] == EVALUATOR.baselines(PROBLEM)["torch"]


def test_baselines_recorded_in_the_run_come_before_those_of_now(store: Store) -> None:
    slow = passed_evaluation(PROBLEM, PLAIN, low=0.8, ratio=0.9)
    assert {row["baseline_us"] for row in rows_of(store, [slow], "lt_auto")} == set(slow.baselines_us.values())


@pytest.mark.parametrize(
    ("evaluations", "status"),
    [
        ([], "left_out"),
        ([failed_evaluation(PROBLEM, PLAIN, Status.FAULT), failed_evaluation(PROBLEM, PDL, Status.WRONG)], "wrong"),
        ([failed_evaluation(PROBLEM, PLAIN), passed_evaluation(PROBLEM, PDL, low=0.9, ratio=1.0)], "passed"),
    ],
)
def test_a_fall_back_says_how_far_ours_came(store: Store, evaluations: list[Evaluation], status: str) -> None:
    assert {row["status"] for row in rows_of(store, evaluations, "lt_auto")} == {status}


def test_a_problem_without_a_baseline_is_refused(store: Store) -> None:
    with pytest.raises(RecordError, match="no baseline"):
        rows_of(store, [], baseline="")


def test_a_winner_that_the_store_does_not_hold_is_refused(store: Store) -> None:
    row = LibraryRow(PROBLEM, "torch", "", "replay:h200", LibraryChoice(PLAIN, 1.2, 1.1, 1.3))
    with pytest.raises(RecordError, match="no evaluation"):
        list(result_rows(Library("h200", (row,)), store, "run", EVALUATOR))
