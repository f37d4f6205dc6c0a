"""Algorithms of baselines outlive a session: a resumed run does not time baselines to name them."""

from __future__ import annotations

from pathlib import Path

from outblas.core.problem import Problem
from outblas.records.store import Store
from outblas.tune.tune_folder import KeptBaselines
from support.gpus.modelled_gpu import SMALL, Model, ModelledEvaluator

FIRST, SECOND = Problem(8, 128, 256), Problem(16, 128, 256)


class Asked(ModelledEvaluator):
    """Counts questions on baselines; names the algorithm after the session."""

    def __init__(self, session: str) -> None:
        super().__init__(Model(speedups={SMALL: lambda m: 1.5}, algorithm=lambda m: f"{session} {m}"))
        self.asked = 0

    def baseline_detail(self, problem: Problem, name: str) -> str:
        self.asked += 1
        return super().baseline_detail(problem, name)


def test_a_later_session_names_the_algorithms_of_the_earlier_one(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        first = KeptBaselines(Asked("first"), store, "run")
        list(first.evaluate([(FIRST, SMALL)]))
    with Store(tmp_path / "store.sqlite") as store:
        asked = Asked("later")
        later = KeptBaselines(asked, store, "run")
        assert later.baseline_detail(FIRST, "lt_auto") == "first 8"
        assert asked.asked == 0
        assert later.baseline_detail(SECOND, "lt_auto") == "later 16"
        last = KeptBaselines(Asked("last"), store, "run")
        assert last.baseline_detail(SECOND, "lt_auto") == "later 16", "what was asked for is kept, too"


def test_algorithms_of_a_later_session_replace_the_kept_ones(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        list(KeptBaselines(Asked("first"), store, "run").evaluate([(FIRST, SMALL)]))
        later = KeptBaselines(Asked("later"), store, "run")
        list(later.evaluate([(FIRST, SMALL)]))
        assert later.baseline_detail(FIRST, "lt_auto") == "later 8"
        assert KeptBaselines(Asked("last"), store, "run").baseline_detail(FIRST, "lt_auto") == "later 8"


def test_a_batch_that_was_given_up_keeps_nothing_and_ends_the_evaluator(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        asked = Asked("first")
        evaluations = KeptBaselines(asked, store, "run").evaluate([(FIRST, SMALL), (SECOND, SMALL)])
        next(evaluations)
        evaluations.close()
        assert asked.asked == 0
        assert store.outcome("run", f"baselines of {FIRST.key}") is None


def test_runs_of_one_store_keep_their_own(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        list(KeptBaselines(Asked("first"), store, "run").evaluate([(FIRST, SMALL)]))
        assert KeptBaselines(Asked("other"), store, "another").baseline_detail(FIRST, "lt_auto") == "other 8"
