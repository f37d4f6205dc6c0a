from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from outblas.core.config import LAUNCHES, KernelConfig, launch_of
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.tune import tune as module
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas.tune.time_shares import balanced_over_rows, time_shares
from outblas.tune.tune import Interrupted, SearchOptions, decided_row, tune
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)

RECORDING = synthetic_recording()


class Counting(ReplayEvaluator):
    """Count the requests, and fail after a given number of answers, as a live evaluator could."""

    def __init__(self, stop_after: int = 10**9, error: BaseException | None = None) -> None:
        super().__init__(RECORDING)
        self.asked: list[tuple[Problem, KernelConfig]] = []
        self._left, self._error = stop_after, error or KeyboardInterrupt()

    def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:  # type: ignore[override]
        for pair in reversed(list(pairs)):  # answers may come in any order
            if self._left == 0:
                raise self._error
            self._left -= 1
            self.asked.append(pair)
            yield from super().evaluate([pair])


def run(path: Path, evaluator: Counting, agent: str = "evolution", budget: int = 6) -> Library:
    with Store(path) as store:
        return tune(RECORDING.problems, make_agent(agent, 1, H200), budget, evaluator, store, "r")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBLEMS_AT_ONCE", 5)


def test_exhaustive_search_finds_the_recorded_best(tmp_path: Path) -> None:
    library = run(tmp_path / "s.sqlite", Counting(), "exhaustive", 100)
    assert [row.problem for row in library.rows] == list(RECORDING.problems)
    for row in library.rows:
        name, baseline_us = RECORDING.best_baseline(row.problem)
        assert (row.baseline, row.source) == (name, "replay:h200")
        assert row.baseline_detail.startswith("algo ")
        for launch in LAUNCHES[:2]:
            best, chosen = RECORDING.best(row.problem, launch != "plain"), row.choice(launch)
            assert best is not None
            if chosen is not None:  # all spreads are equal, so the best lower bound is the best median
                assert chosen.config == best[0] and chosen.speedup == baseline_us / best[1]
            else:
                assert baseline_us / best[1] < 1.05
    assert any(row.plain is None for row in library.rows) and any(row.plain for row in library.rows)


@pytest.mark.parametrize("stop", [0, 1, 3, 19, 20, 21, 40, 71])
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path: Path, stop: int) -> None:
    whole_evaluator = Counting()
    whole = run(tmp_path / "whole.sqlite", whole_evaluator)
    path = tmp_path / "s.sqlite"
    first = Counting(stop)
    with pytest.raises(Interrupted) as caught:
        run(path, first)
    assert all(word in str(caught.value) for word in (f"with {stop} of 72", str(path), "under run ID r"))
    with Store(path) as store:
        assert len(store.recorded_pairs("r")) == len(first.asked) == stop
    second = Counting()
    assert run(path, second) == whole
    asked = first.asked + second.asked
    assert len(asked) == len(set(asked)) == 72 and set(asked) == set(whole_evaluator.asked)


def test_an_interrupted_group_counts_its_own_problems(tmp_path: Path) -> None:
    """Steps of `outblas build-library` search group by group, all under one run id."""
    first, second = RECORDING.problems[:8], RECORDING.problems[8:]
    agent, path = make_agent("evolution", 1, H200), tmp_path / "s.sqlite"
    with Store(path) as store:
        tune(first, agent, 6, Counting(), store, "r")
        with pytest.raises(Interrupted, match=f"with 3 of {6 * len(second)} measurements of {len(second)} problems;"):
            tune(second, agent, 6, Counting(3), store, "r")
        with pytest.raises(Interrupted, match="with 2 of 2 measurements of 1 problem;"):  # it has 6 from before
            tune(first[:1], agent, 2, Interrupting(), store, "r")


class Interrupting(Counting):
    """Ctrl-C between two groups: before any request."""

    def expect(self, problems: Iterable[Problem]) -> None:
        raise KeyboardInterrupt


def test_a_finished_run_measures_nothing_again(tmp_path: Path) -> None:
    library = run(tmp_path / "s.sqlite", Counting())
    again = Counting(0)
    assert run(tmp_path / "s.sqlite", again) == library and not again.asked


def test_a_larger_budget_goes_on_where_the_run_ended(tmp_path: Path) -> None:
    run(tmp_path / "s.sqlite", Counting(), "exhaustive", 4)
    more = Counting()
    run(tmp_path / "s.sqlite", more, "exhaustive", 6)
    assert len(more.asked) == 2 * len(RECORDING.problems)


def test_an_error_of_the_evaluator_loses_nothing(tmp_path: Path) -> None:
    error = RecordError("disk", "space", "free some")
    with pytest.raises(RecordError):
        run(tmp_path / "s.sqlite", Counting(7, error))
    with Store(tmp_path / "s.sqlite") as store:
        assert len(store.recorded_pairs("r")) == 7


def test_the_whole_budget_may_be_asked_for_at_once(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Noting(Counting):
        def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:  # type: ignore[override]
            listed = list(pairs)
            sizes.append(len(listed))
            yield from super().evaluate(listed)

    for per_round in (4, 6):
        with Store(tmp_path / f"{per_round}.sqlite") as store:
            tune(
                RECORDING.problems[:5],
                make_agent("exhaustive", 0, H200),
                6,
                Noting(),
                store,
                "r",
                options=SearchOptions(per_round=per_round),
            )
    assert [size for size in sizes if size] == [20, 10, 30]


def test_a_row_names_the_autotuned_algorithm(tmp_path: Path) -> None:
    """In this recording lt_auto is the fastest of all. A row names it only where torch is over 1% slower."""
    library = run(tmp_path / "a.sqlite", Counting())
    assert all(row.baseline == "lt_auto" and row.lt_auto_detail == "" for row in library.rows)
    assert [row.algorithm for row in library.rows] == [f"algo {i}" for i in range(len(library.rows))]

    every = [f"algo {i}" for i in range(len(library.rows))]
    for times, best, names in (
        ({"torch": 1e-3, "lt_auto": 1.005e-3}, "torch", [""]),
        ({"torch": 1.005e-3, "lt_auto": 1e-3}, "lt_auto", [""]),
        ({"torch": 1.02e-3, "lt_auto": 1e-3}, "lt_auto", every),
    ):

        class RivalsFirst(Counting):
            def baselines(self, problem: Problem, times: dict[str, float] = times) -> dict[str, float]:
                return {**super().baselines(problem), **times}

        fallen = run(tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite", RivalsFirst()).rows
        assert all(row.plain is None and row.pdl is None and row.baseline == best for row in fallen)
        assert list(dict.fromkeys(row.algorithm for row in fallen)) == names


def test_a_row_without_a_winner_keeps_the_nearest_kernel() -> None:
    problem, evaluator = synthetic_problems()[0], ReplayEvaluator(synthetic_recording())
    slow, other_launch, slower = synthetic_catalogue()[:3]
    assert launch_of(other_launch) != "plain" == launch_of(slow) == launch_of(slower)
    bounds = {slow: 0.97, slower: 0.8, other_launch: 0.98}
    tried = [passed_evaluation(problem, config, low, low) for config, low in bounds.items()]
    row = decided_row(problem, [failed_evaluation(problem, slow), *tried], evaluator)
    assert row.plain is None and row.kernel("plain") is None
    assert row.nearest is not None and (row.nearest.config, row.nearest.low) == (slow, 0.97)
    assert decided_row(problem, [*tried, passed_evaluation(problem, slower)], evaluator).nearest is None
    assert decided_row(problem, [failed_evaluation(problem, slow)], evaluator).nearest is None


def test_progress_counts_every_measurement(tmp_path: Path) -> None:
    calls: list[tuple[int, int, float]] = []
    with Store(tmp_path / "s.sqlite") as store:
        library = tune(
            RECORDING.problems,
            make_agent("random", 0, H200),
            3,
            Counting(),
            store,
            "r",
            lambda *arguments: calls.append(arguments),
        )
    assert [(done, total) for done, total, _ in calls] == [(i + 1, 36) for i in range(36)]
    geomeans = [g for _, _, g in calls]
    assert geomeans == sorted(geomeans) and geomeans[0] >= 1
    assert math.isclose(geomeans[-1], library.geomean("pdl"))


def test_a_run_is_not_mixed_with_another_agent_or_seed(tmp_path: Path) -> None:
    run(tmp_path / "s.sqlite", Counting(), "random")
    with pytest.raises(UsageError, match="other settings .agent"):
        run(tmp_path / "s.sqlite", Counting(), "evolution")


def test_a_problem_that_always_fails_uses_the_baseline(tmp_path: Path) -> None:
    class Failing(Counting):
        def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:  # type: ignore[override]
            for problem, config in pairs:
                yield Evaluation(problem, config, Status.COMPILE_ERROR)

    library = run(tmp_path / "s.sqlite", Failing())
    assert all(row.plain is None and row.pdl is None and row.baseline == "lt_auto" for row in library.rows)
    assert library.geomean("pdl") == 1.0


def test_bad_arguments(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        agent, replay = make_agent("random", 0, H200), Counting()
        with pytest.raises(UsageError, match="budget is 0"):
            tune(RECORDING.problems, agent, 0, replay, store, "r")
        with pytest.raises(UsageError, match="given twice"):
            tune(RECORDING.problems[:1] * 2, agent, 1, replay, store, "r")
        with pytest.raises(UsageError, match="not in the recording"):
            tune([Problem(8, 8, 8)], agent, 1, replay, store, "r")
        assert tune([], agent, 1, replay, store, "r").rows == ()


class Cheating(Agent):
    def __init__(self, choice: str) -> None:
        super().__init__(0, H200)
        self.name, self.choice = "cheating", choice

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        masked = [c for c in RECORDING.catalogue if c not in candidates]
        return {
            "masked": masked[:1],
            "repeat": list(candidates[:1]),
            "twice": list(candidates[:1]) * 2,
            "many": list(candidates),
        }[self.choice]


@pytest.mark.parametrize("choice", ["masked", "repeat", "twice", "many"])
def test_an_agent_that_breaks_its_contract_is_named(tmp_path: Path, choice: str) -> None:
    problem = next(p for p in RECORDING.problems if not RECORDING.recorded_mask(p).all())
    with Store(tmp_path / "s.sqlite") as store, pytest.raises(UsageError, match="agent 'cheating'"):
        tune([problem], Cheating(choice), 8, Counting(), store, "r")


def test_an_agent_may_stop_early(tmp_path: Path) -> None:
    class Lazy(Cheating):
        def propose(self, problem, candidates, history, n):  # type: ignore[no-untyped-def]
            return [] if history else list(candidates[:1])

    with Store(tmp_path / "s.sqlite") as store:
        tune(RECORDING.problems, Lazy(""), 8, Counting(), store, "r")
        assert len(store.recorded_pairs("r")) == len(RECORDING.problems)


def test_a_stop_ends_the_search_with_what_was_reached_and_a_later_run_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.sqlite", Counting(), "evolution", 6)
    path, evaluator = tmp_path / "s.sqlite", Counting()

    def search(limit: int, evaluator: Counting) -> Library:
        with Store(path) as store:
            agent = make_agent("evolution", 1, H200)
            stop = lambda: len(evaluator.asked) >= limit  # noqa: E731
            return tune(
                RECORDING.problems, agent, 6, evaluator, store, "r", options=SearchOptions(stop=stop, at_once=2)
            )

    part = search(5, evaluator)
    assert len(evaluator.asked) == 5, "nothing is measured after the stop"
    assert {row.problem for row in part.rows} == {problem for problem, _ in evaluator.asked}
    with Store(path) as store:
        assert len(store.recorded_pairs("r")) == 5
    rest = Counting()
    full = search(10**9, rest)
    assert not set(rest.asked) & set(evaluator.asked) and len(full.rows) == len(whole.rows)


def test_problems_may_have_budgets_of_their_own(tmp_path: Path) -> None:
    first, second = RECORDING.problems[:2]
    evaluator = Counting()
    with Store(tmp_path / "s.sqlite") as store:
        tune(
            [first, second],
            make_agent("random", 1, H200),
            3,
            evaluator,
            store,
            "r",
            options=SearchOptions(budgets={first: 5}),
        )
    asked = [problem for problem, _ in evaluator.asked]
    assert (asked.count(first), asked.count(second)) == (5, 3)
    with Store(tmp_path / "t.sqlite") as store, pytest.raises(UsageError, match="budget is 0"):
        tune(
            [first], make_agent("random", 1, H200), 3, evaluator, store, "r", options=SearchOptions(budgets={first: 0})
        )


def test_a_search_may_leave_out_launch_options(tmp_path: Path) -> None:
    """All measurements then go to kernels that the caller's calls would run."""
    evaluator = Counting()
    with Store(tmp_path / "s.sqlite") as store:
        options = SearchOptions(launch="plain")
        tune(RECORDING.problems[:3], make_agent("heuristic", 1, H200), 4, evaluator, store, "r", options=options)
    assert len(evaluator.asked) == 12 and all(launch_of(config) == "plain" for _, config in evaluator.asked)


def test_shares_may_be_balanced_over_the_numbers_of_rows() -> None:
    long, short = Problem(512, 4096, 4096), Problem(512, 1024, 4096)
    us = {long: 6.0, short: 2.0, Problem(1, 4096, 4096): 2.0}
    ranked = balanced_over_rows(time_shares(dict.fromkeys(us, 1), us.__getitem__))
    assert [one.problem.m for one in ranked] == [1, 512, 512]
    assert [one.share for one in ranked] == pytest.approx([0.5, 0.375, 0.125])
    assert balanced_over_rows([]) == []
