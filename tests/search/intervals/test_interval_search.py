"""The search for intervals of M, on a fake GPU whose winners change at known M, and on a recording."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import LAUNCHES, KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.weight import Weight, WeightRange
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas.tune.agents.random_search import Exhaustive
from outblas.tune.intervals import interval_search
from outblas.tune.intervals.cells import drawn, sampled
from outblas.tune.intervals.interval_search import OPEN_GAP, SearchWatch
from outblas.tune.intervals.range_search import RangesRequest, TunedRanges, search_ranges
from outblas.tune.tune import Interrupted
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.gpus.modelled_gpu import FEW, LARGE, SMALL, SPARE, Model, ModelledEvaluator
from support.helpers import synthetic_recording

WEIGHT = Weight(128, 256)
EVERY = WeightRange(WEIGHT, 1, 1024)


def below(m: int, fast: float, slow: float = 0.8) -> Callable[[int], float]:
    return lambda at: fast if at < m else slow


def model(**changed: Any) -> Model:
    """FEW wins up to 8, SMALL up to 99, LARGE from 100 to 599, and the baseline from there on."""
    speeds = {FEW: below(10**9, 1.5), SMALL: below(100, 1.4), LARGE: below(600, 1.1), SPARE: below(1, 1.0, 0.7)}
    return Model(**{"speedups": speeds, **changed})


def search(
    path: Path, made: Model, request: RangesRequest | None = None, agent: str = "exhaustive", **options: Any
) -> TunedRanges:
    with Store(path) as store:
        return search_ranges(
            RangesRequest([EVERY]) if request is None else request,
            make_agent(agent, options.get("seed", 0), H200),
            options.get("budget", 16),
            options.get("evaluator", ModelledEvaluator(made)),
            options.get("recording"),
            store,
            "r",
            SearchWatch(options.get("stop", lambda: False), options.get("told", lambda *_: None)),
        )


def plain(intervals: Any) -> list[tuple[int, int, KernelConfig | None]]:
    return [(one.first, one.last, one.row.plain and one.row.plain.config) for one in intervals]


WINNERS = [(1, 8, FEW), (9, 99, SMALL), (100, 599, LARGE), (600, 1024, None)]


# -- what is measured ----------------------------------------------------------------------------------------------


# -- what is found -------------------------------------------------------------------------------------------------


def test_the_changes_of_winner_are_found_to_the_m(tmp_path: Path) -> None:
    made = model()
    found = search(tmp_path / "s.sqlite", made)
    assert plain(found.intervals) == WINNERS
    assert len(made.asked) == len(set(made.asked)), "nothing was measured twice"
    assert len({problem for problem, _ in made.asked}) < 60, "a sample, not all 1024 M"
    assert [row.problem.m for row in found.rows] == sampled(range(1, 1025)) and found.reached == 1
    for row in found.rows:
        holding = next(one for one in found.intervals if one.first <= row.problem.m <= one.last)
        assert (row.plain and row.plain.config) == (holding.row.plain and holding.row.plain.config)
        assert row.plain is None or holding.row.plain is None or row.plain.low >= holding.row.plain.low


def test_only_the_m_and_the_launch_option_of_a_program_are_searched(tmp_path: Path) -> None:
    sizes = [1, 2, 4, 8, 64, 96, 104, 512]
    made = model(speedups={**model().speedups, replace(SMALL, pdl=True): below(1024, 2.0)})
    found = search(tmp_path / "s.sqlite", made, RangesRequest([EVERY], only={WEIGHT: sizes}, launch="plain"))
    assert plain(found.intervals) == [(1, 8, FEW), (64, 96, SMALL), (104, 512, LARGE)]
    assert not any(config.pdl for _, config in made.asked)
    proved_inside = {problem.m for problem, _ in made.asked} - set(sizes)
    assert len(proved_inside) >= 4, "two between the sizes of an interval"
    assert all(any(a < m < b for a, b, _ in plain(found.intervals)) for m in proved_inside)


def test_an_interval_ends_before_an_m_of_a_program_at_which_the_baseline_is_fast(tmp_path: Path) -> None:
    sizes = [1, 2, 4, *range(8, 513, 8)]
    slow = next(m for m in sizes if 300 < m < 490 and m not in sampled(sizes))
    made = model(speedups={LARGE: lambda m: 0.8 if m == slow else 1.3})
    found = search(tmp_path / "s.sqlite", made, RangesRequest([EVERY], only={WEIGHT: sizes}, launch="plain"))
    assert not any(one.first <= slow <= one.last and one.has_kernel for one in found.intervals)
    assert {problem.m for problem, _ in made.asked} >= set(sizes)
    assert sum(one.has_kernel for one in found.intervals) == 2


def test_a_third_kernel_that_wins_between_two_sampled_m_is_found(tmp_path: Path) -> None:
    ends = sampled(range(1, 1025))
    first, last = next((a, b) for a, b in itertools.pairwise(ends) if a < 100 <= b)  # SMALL gives way to LARGE
    assert first + 2 < last and all(m not in ends for m in range(first + 1, last))
    speeds = {**model().speedups, SPARE: lambda m: 1.6 if first < m < last else 0.7}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds))
    assert (first + 1, last - 1, SPARE) in plain(found.intervals)


def test_a_kernel_that_wins_between_two_m_without_one_is_found(tmp_path: Path) -> None:
    ends = sampled(range(1, 8193))
    first, last = next((a, b) for a, b in itertools.pairwise(ends) if a >= 600 and b >= OPEN_GAP * a)
    speeds = {**model().speedups, SPARE: lambda m: 1.6 if first < m < last else 0.7}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds), RangesRequest([WeightRange(WEIGHT, 1, 8192)]))
    assert (first + 1, last - 1, SPARE) in plain(found.intervals)


def test_the_plain_twin_of_a_winner_with_pdl_is_measured_beyond_the_budget(tmp_path: Path) -> None:
    early = SMALL.with_knobs(pdl=True)
    made = model(speedups={early: below(10**6, 1.5), SMALL: below(10**6, 1.4), LARGE: below(10**6, 0.9)})
    (found,) = search(tmp_path / "s.sqlite", made, budget=1).intervals  # the agent proposes the first kernel
    assert [found.row.choice(launch).config for launch in ("plain", "pdl")] == [SMALL, early]  # type: ignore[union-attr]


def test_a_kernel_that_both_neighbours_of_an_m_propose_is_measured_there_once(tmp_path: Path) -> None:
    speeds = {SMALL: lambda m: 0.8 if 60 < m < 100 else 1.3, LARGE: below(10**6, 1.2), SPARE: below(10**6, 1.1)}
    for seed in range(6):
        made = model(speedups=speeds)
        search(tmp_path / f"{seed}.sqlite", made, RangesRequest([EVERY]), "random", budget=1, seed=seed)
        assert len(made.asked) == len(set(made.asked))


def test_problems_of_changes_and_proofs_are_announced_before_they_are_measured(tmp_path: Path) -> None:
    class Announced(ModelledEvaluator):
        def __init__(self, made: Model) -> None:
            super().__init__(made)
            self.expected: set[Problem] = set()

        def expect(self, problems: Iterable[Problem]) -> None:
            self.expected |= set(problems)

        def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
            for problem, config in pairs:
                assert problem in self.expected
                yield from super().evaluate([(problem, config)])

    found = search(tmp_path / "store.sqlite", (made := model()), evaluator=Announced(made))
    assert len({problem for problem, _ in made.asked}) > len(found.rows)


def test_each_interval_is_proved_at_both_ends_and_at_two_ragged_m(tmp_path: Path) -> None:
    made = model()
    asked: dict[KernelConfig, set[int]] = {}
    found = search(tmp_path / "s.sqlite", made)
    for problem, config in made.asked:
        asked.setdefault(config, set()).add(problem.m)
    for one in found.intervals:
        assert {one.first, one.last} <= set(one.measured)
        if one.row.plain is not None:
            assert set(one.measured) <= asked[one.row.plain.config]
            inner = range(one.first + 1, one.last)
            wanted = drawn(WEIGHT, one.first, one.last, inner)
            assert len(wanted) == 2 and set(wanted) <= set(one.measured)
            assert all(why_illegal(WEIGHT.problem(m), one.row.plain.config, H200) is None for m in one.measured)


def test_the_figures_of_an_interval_are_its_lowest(tmp_path: Path) -> None:
    speeds = {**model().speedups, LARGE: lambda m: 1.1 + m / 10000 if m < 600 else 0.8}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds))
    for one in found.intervals:
        if one.row.plain is not None:
            lows = [speeds[one.row.plain.config](m) * 0.99 for m in one.measured]
            assert one.row.plain.low == pytest.approx(min(lows))


def test_a_kernel_that_fails_at_one_m_serves_none(tmp_path: Path) -> None:
    clean = search(tmp_path / "clean.sqlite", model())
    large = clean.intervals[2]
    ragged = drawn(WEIGHT, large.first, large.last, range(large.first + 1, large.last))[0]
    made = model(fails=lambda problem, config: problem.m == ragged and config == LARGE)
    found = search(tmp_path / "s.sqlite", made)
    assert (WEIGHT.problem(ragged), LARGE) in made.asked
    assert plain(found.intervals) == [(1, 8, FEW), (9, 99, SMALL), (100, 1024, None)]


def test_a_kernel_that_is_slow_at_a_drawn_m_does_not_serve_it(tmp_path: Path) -> None:
    clean = search(tmp_path / "clean.sqlite", model())
    large = clean.intervals[2]
    ragged = drawn(WEIGHT, large.first, large.last, range(large.first + 1, large.last))[0]
    speeds = {**model().speedups, LARGE: lambda m: 0.5 if m == ragged else 1.1 if m < 600 else 0.8}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds))
    served = Library("h200", (), {}, found.intervals)
    expected = {8: FEW, 99: SMALL, ragged - 1: LARGE, ragged: None, ragged + 1: LARGE, 599: LARGE, 1024: None}
    for m, config in expected.items():
        row = served.lookup(WEIGHT.problem(m))
        assert row is not None and (row.plain and row.plain.config) == config, m


def test_a_kernel_is_legal_for_each_m_of_its_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMALL needs a multiple of 8 rows, and LARGE cannot run one M amid its range."""

    def why(problem: Problem, config: KernelConfig, gpu: Any) -> str | None:
        if (config == SMALL and problem.m % 8) or (config == LARGE and problem.m == 333):
            return "not for this M"
        return why_illegal(problem, config, gpu)

    for module in ("outblas.tune.intervals.cells", "support.gpus.modelled_gpu"):
        monkeypatch.setattr(f"{module}.why_illegal", why)
    made = model()
    served = Library("h200", (), {}, search(tmp_path / "s.sqlite", made).intervals)
    assert not [pair for pair in made.asked if why(*pair, H200)]
    kernels = {one.row.plain.config for one in served.intervals if one.row.plain is not None}
    assert kernels == {FEW, LARGE}, "a kernel for aligned M alone serves no range"
    for one in served.intervals:
        if one.row.plain is not None:
            every = (WEIGHT.problem(m) for m in range(one.first, one.last + 1))
            assert not [problem for problem in every if why(problem, one.row.plain.config, H200)]
    near = {m: served.lookup(WEIGHT.problem(m)) for m in (200, 333, 500)}
    assert [row and row.plain and row.plain.config for row in near.values()] == [LARGE, None, LARGE]


def test_kernels_within_one_percent_do_not_split_a_range(tmp_path: Path) -> None:
    """Two processes differ by that much, so a change of winner by less is noise."""
    speeds = {SMALL: lambda m: 1.3 + 0.005 * (m % 2), LARGE: lambda m: 1.305 - 0.005 * (m % 2)}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds))
    assert [(one.first, one.last) for one in found.intervals] == [(1, 1024)]


def test_launch_options_change_at_their_own_m(tmp_path: Path) -> None:
    dependent, early = SMALL.with_knobs(pdl=True), LARGE.with_knobs(pdl=True, early=True)
    speeds = {SMALL: below(200, 1.2), dependent: below(50, 1.3), early: below(700, 1.5)}
    found = search(tmp_path / "s.sqlite", model(speedups=speeds))
    got = [
        (one.first, one.last, *(choice and choice.config for choice in map(one.row.choice, LAUNCHES)))
        for one in found.intervals
    ]
    assert got == [
        (1, 49, SMALL, dependent, early),
        (50, 199, SMALL, SMALL, early),
        (200, 699, None, None, early),
        (700, 1024, None, None, None),
    ]
    assert [one.row.weights is None for one in found.intervals] == [False, False, False, True]


def test_ranges_without_a_kernel_run_the_algorithm_that_was_the_fastest(tmp_path: Path) -> None:
    made = model(speedups={SPARE: below(1, 1, 0.7)}, algorithm=lambda m: "index=3 id=1" if m < 200 else "index=9 id=2")
    found = search(tmp_path / "s.sqlite", made)
    first, second = found.intervals
    assert (first.row.fallback, second.row.fallback) == ("id=1", "id=2")
    assert (first.first, second.first, second.last) == (1, first.last + 1, 1024) and 166 <= first.last < 273
    # Beside a kernel of another launch option: only an algorithm that every measured M names.
    dependent = SPARE.with_knobs(pdl=True)
    made = replace(made, speedups={dependent: below(10**6, 1.3)}, asked=[])
    found = search(tmp_path / "t.sqlite", made)
    (one,) = found.intervals
    assert (one.row.plain, one.row.fallback, one.row.pdl and one.row.pdl.config) == (None, "", dependent)


def test_a_random_model_is_served_as_its_best_kernels_at_each_measured_m(tmp_path: Path) -> None:
    rng = random.Random(11)
    for case in range(12):
        ends = {c: rng.choice([20, 90, 300]) for c in (SMALL, LARGE, SPARE)}
        tops = {c: 1.0 + 0.1 * rng.randint(0, 5) for c in ends}
        made = model(speedups={c: below(end, tops[c]) for c, end in ends.items()})
        asked = WeightRange(WEIGHT, rng.randint(1, 30), rng.randint(40, 400))
        found = search(tmp_path / f"{case}.sqlite", made, RangesRequest([asked]))
        assert (found.intervals[0].first, found.intervals[-1].last) == (asked.first, asked.last)
        assert all(b.first == a.last + 1 for a, b in pairwise(found.intervals))
        for one in found.intervals:
            for m in (one.first, (one.first + one.last) // 2, one.last):
                best = max(speed(m) for speed in made.speedups.values())
                served = 1.0 if one.row.plain is None else made.speedups[one.row.plain.config](m)
                assert served >= best / 1.01 or best * 0.99 <= 1.01


# -- limits, stops and resumed runs --------------------------------------------------------------------------------


def test_a_limit_of_measured_m_leaves_gaps_and_nothing_unproved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval_search, "MOST_MEASURED", 14)
    monkeypatch.setattr(interval_search, "MOST_PROOF_ROUNDS", 1)
    found = search(tmp_path / "s.sqlite", model())
    held = sum(one.last - one.first + 1 for one in found.intervals)
    assert 0 < held < 1024 and Library("h200", (), {}, found.intervals).lookup(WEIGHT.problem(1)) is not None
    for one in found.intervals:
        inner = drawn(WEIGHT, one.first, one.last, range(one.first + 1, one.last))
        assert not one.has_kernel or set(inner) <= set(one.measured)
    left = [row for row in found.rows if not any(one.first <= row.problem.m <= one.last for one in found.intervals)]
    assert all(row.plain is None for row in left)


@pytest.mark.parametrize("stop_after", [3, 40, 50])
def test_a_stop_keeps_what_is_proved_and_the_next_start_goes_on(tmp_path: Path, stop_after: int) -> None:
    made, two = model(), RangesRequest([EVERY, replace(EVERY, weight=Weight(256, 128))])
    first = search(tmp_path / "s.sqlite", made, two, stop=lambda: len(made.asked) >= stop_after)
    assert first.stopped and first.reached == 0 and len(made.asked) == stop_after
    assert {one.weight for one in first.intervals} <= {WEIGHT}
    for one in first.intervals:
        inner = drawn(WEIGHT, one.first, one.last, range(one.first + 1, one.last))
        assert not one.has_kernel or set(inner) <= set(one.measured)
    whole = search(tmp_path / "whole.sqlite", model(), two)
    assert search(tmp_path / "s.sqlite", made, two) == whole and len(made.asked) == len(set(made.asked))


@pytest.mark.parametrize("kill_at", [0, 12, 36, 44, 50])
def test_a_killed_run_resumes_to_the_result_of_a_whole_one(tmp_path: Path, kill_at: int) -> None:
    whole, made = model(), model(kill_at=kill_at)
    expected = search(tmp_path / "whole.sqlite", whole, agent="evolution", budget=3)
    with pytest.raises(Interrupted, match=f"with {kill_at} .*measurements; they are saved in .* under run ID r"):
        search(tmp_path / "s.sqlite", made, agent="evolution", budget=3)
    assert len(made.asked) == kill_at < len(whole.asked)
    made.kill_at = None
    assert search(tmp_path / "s.sqlite", made, agent="evolution", budget=3) == expected
    assert len(made.asked) == len(set(made.asked)) and set(made.asked) == set(whole.asked)


def test_only_an_agent_that_observes_seeks_a_finished_weight_again(tmp_path: Path, monkeypatch: Any) -> None:
    made, told, request = model(), list[str](), RangesRequest([EVERY])
    found = search(tmp_path / "s.sqlite", made, request)
    monkeypatch.setattr(interval_search, "tune", lambda *_: pytest.fail("the agent is asked"))
    assert search(tmp_path / "s.sqlite", made, request, told=lambda *words: told.append(words[2])) == found
    assert told == ["128 x 256: already done"]
    monkeypatch.setattr(Exhaustive, "observe", lambda self, seen: None)
    every = range(1, 1025)
    others = ({"wanted": {WEIGHT: [77]}}, {"launch": "plain"}, {"only": {WEIGHT: every}}, {"free": {WEIGHT: every}})
    for changed in ({}, {"budget": 1}, *({"request": replace(request, **other)} for other in others)):
        with pytest.raises(pytest.fail.Exception, match="the agent is asked"):
            search(tmp_path / "s.sqlite", made, **{"request": request, **changed})
        monkeypatch.setattr(Exhaustive, "observe", Agent.observe)


def test_progress_counts_every_measurement_over_all_weights(tmp_path: Path) -> None:
    made, told = model(), list[tuple[int, int, str]]()
    two = RangesRequest([EVERY, replace(EVERY, weight=Weight(256, 128))])
    search(tmp_path / "s.sqlite", made, two, told=lambda *words: told.append(words))
    measured = [done for done, _, word in told if not word.endswith("done")]
    assert measured == list(range(1, len(made.asked) + 1))
    assert all(done <= known for done, known, _ in told) and told[-1][:2] == (len(made.asked), len(made.asked))
    assert all(done < known for done, known, word in told if word.endswith("search")), "a bar that is full too early"
    assert {word.partition(": ")[2] for _, _, word in told} == {"search", "changes", "proofs", "done"}
    assert told[0][2].startswith("128 x 256") and told[-1][2].startswith("256 x 128")


# -- a recording ---------------------------------------------------------------------------------------------------


class Recorded(ReplayEvaluator):
    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.asked: list[tuple[Problem, KernelConfig]] = []

    def evaluate(self, pairs: Any) -> Any:
        listed = list(pairs)
        self.asked += listed
        return super().evaluate(listed)


def test_a_recording_measures_its_own_m_and_claims_nothing_between_changes(tmp_path: Path) -> None:
    recording = synthetic_recording()
    evaluator = Recorded(recording)
    request = RangesRequest([WeightRange(Weight(128, 256), 1, 8192)])
    found = search(tmp_path / "s.sqlite", model(), request, evaluator=evaluator, recording=recording)
    assert {problem.m for problem, _ in evaluator.asked} == {64, 128, 192, 256}
    assert found.intervals and all(set(one.measured) <= {64, 128, 192, 256} for one in found.intervals)
    for one in found.intervals:
        assert not one.has_kernel or {one.first, one.last} <= set(one.measured)
    empty = WeightRange(Weight(64, 64), 1, 9)
    with pytest.raises(UsageError, match=r"the recording has no values of M from 1 to 9 for weight 64_64_TN_fp16_fp32"):
        search(tmp_path / "t.sqlite", model(), RangesRequest([empty]), evaluator=evaluator, recording=recording)


# -- which ranges --------------------------------------------------------------------------------------------------
