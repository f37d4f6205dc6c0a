"""The search for intervals where something is missing: memory, time, free M, or what an agent could learn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.weight import Weight
from outblas.tune.intervals import interval_search
from outblas.tune.intervals.range_search import RangesRequest
from search.intervals.test_interval_search import EVERY, WEIGHT, model, plain, search
from support.gpus.modelled_gpu import SMALL, ModelledEvaluator


def test_an_m_that_exceeds_the_memory_blames_no_kernel(tmp_path: Path) -> None:
    class Small(ModelledEvaluator):
        def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
            for problem, config in pairs:
                if problem.m < 1024:
                    yield from super().evaluate([(problem, config)])
                else:
                    yield Evaluation(problem, config, Status.LAUNCH_ERROR, "out of memory")

        def baselines(self, problem: Problem) -> dict[str, float]:
            return dict(super().baselines(problem)) if problem.m < 1024 else {}

    whole = search(tmp_path / "whole.sqlite", model())
    found = search(tmp_path / "small.sqlite", (made := model()), evaluator=Small(made))
    kernels = [[one for one in each.intervals if one.has_kernel] for each in (found, whole)]
    assert kernels[0] == kernels[1] and [row.problem.m for row in found.rows] == [
        row.problem.m for row in whole.rows if row.problem.m < 1024
    ]


def test_after_a_stop_no_fall_back_reaches_over_a_kernel_that_is_not_proved(tmp_path: Path) -> None:
    for stop_after in (100, 119, 128, 131):
        made, left = model(), itertools.count()
        found = search(tmp_path / f"{stop_after}.sqlite", made, stop=lambda: next(left) >= stop_after)  # noqa: B023
        for one in (each for each in found.intervals if not each.has_kernel):
            between = [p.m for p, _ in made.asked if one.first <= p.m <= one.last]
            assert set(between) <= set(one.measured), (stop_after, one.words)


@pytest.mark.parametrize(("agent", "several"), [("heuristic", False), ("random", True)])
def test_an_agent_that_learns_nothing_is_asked_once_for_each_m(
    agent: str, several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval_search, "CANDIDATES_PER_ROUND", 1)
    batches: list[list[Problem]] = []

    class Batches(ModelledEvaluator):
        def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
            listed = list(pairs)
            batches.append(list(dict.fromkeys(problem for problem, _ in listed)))
            yield from super().evaluate(listed)

    request = RangesRequest([EVERY])
    search(tmp_path / "s.sqlite", (made := model()), request, agent, evaluator=Batches(made))
    sampled = [EVERY.problem(m) for m in request.sampled(EVERY, None)]
    assert batches[0] == sampled and (batches[1] == sampled) is several


def test_no_interval_holds_an_m_that_is_not_free(tmp_path: Path) -> None:
    sizes, free = [1, 2, 4, 8, 64, 96, 104, 512], [*range(3, 65), *range(90, 601)]
    made = model(speedups={SMALL: lambda m: 1.3})
    request = RangesRequest([EVERY], only={WEIGHT: sizes}, launch="plain", free={WEIGHT: free})
    found = search(tmp_path / "s.sqlite", made, request)
    assert plain(found.intervals) == [(4, 64, SMALL), (96, 512, SMALL)]
    assert [row.problem.m for row in found.rows] == [4, 8, 64, 96, 104, 512]
    assert all({one.first, one.last} <= set(one.measured) for one in found.intervals)


def test_the_ends_of_free_m_are_sampled_and_a_weight_without_any_is_not_searched(tmp_path: Path) -> None:
    other = replace(EVERY, weight=Weight(256, 128))
    free = {WEIGHT: [*range(3, 8), *range(301, 411)], other.weight: ()}
    request = RangesRequest([EVERY, other], free=free)
    assert {3, 7, 301, 410} <= set(request.sampled(EVERY, None)) <= set(free[WEIGHT])
    found = search(tmp_path / "s.sqlite", model(speedups={SMALL: lambda m: 1.3}), request)
    assert plain(found.intervals) == [(3, 7, SMALL), (301, 410, SMALL)]
    assert request.searched == [EVERY] and found.reached == 1
