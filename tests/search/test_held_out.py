"""A comparison's tasks, its searches, its runs on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.compare import held_out
from outblas_lab.compare.held_out import (
    CompareUnit,
    HeldOutTask,
    Plan,
    held_out_tasks,
    run_unit,
    search_task,
    search_times,
    tasks_of,
)
from outblas_lab.pool.record_suite import left_out_beyond
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import synthetic_recording

BUDGETS = (0, 1, 2, 4, 32)


def recording_with(status: dict[int, Status] | None = None) -> Recording:
    """All cells passed but the columns named; column c takes c + 1 microseconds on every problem."""
    made = synthetic_recording(problems=12, candidates=10)
    codes = np.full(made.status.shape, STATUS_CODES[Status.PASSED], np.int8)
    for column, found in (status or {}).items():
        codes[:, column] = STATUS_CODES[found]
    passed = codes == STATUS_CODES[Status.PASSED]
    times = np.broadcast_to(np.arange(1, 11, dtype=np.float32), codes.shape)
    return replace(
        made,
        status=codes,
        median_us=np.where(passed, times, np.nan).astype(np.float32),
        spread=np.where(passed, 0.01, np.nan).astype(np.float32),
        rounds=np.where(passed, 7, 0).astype(np.int16),
    )


class Backwards(Agent):
    """The last candidate first: the slowest, in ``recording_with``."""

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(candidates, history)[::-1][:n]


def agent_of(cls: type[Agent]) -> Agent:
    return cls(0, synthetic_recording().gpu)


def plain_task(recording: Recording) -> HeldOutTask:
    return tasks_of(recording, recording.problems[0])[0]


# Tasks


def test_a_task_offers_the_recorded_candidates_of_one_launch_option() -> None:
    recording = recording_with({0: Status.LEFT_OUT, 1: Status.ILLEGAL, 2: Status.WRONG})
    plain, pdl = tasks_of(recording, recording.problems[3])
    assert (plain.launch, pdl.launch) == ("plain", "pdl")
    assert plain.candidates == recording.catalogue[2::2] and pdl.candidates == recording.catalogue[3::2]
    assert (plain.best_us, plain.worst_us) == (5.0, 9.0) and (pdl.best_us, pdl.worst_us) == (4.0, 10.0)


def test_a_launch_option_without_a_time_is_no_task() -> None:
    recording = recording_with(dict.fromkeys(range(1, 10, 2), Status.WRONG))
    assert [task.launch for task in tasks_of(recording, recording.problems[0])] == ["plain"]


def test_a_sample_is_of_the_held_out_problems_and_leaves_the_training_as_it_is() -> None:
    recording = recording_with()
    plan = Plan("x", BUDGETS, 0.5)
    all_split, all_tasks = held_out_tasks(plan, recording, "shapes")
    split, tasks = held_out_tasks(replace(plan, sample=2), recording, "shapes")
    assert split == all_split and len(all_tasks) == 2 * len(split.held_out)
    assert len(tasks) == 4 and {t.problem for t in tasks} < set(split.held_out)
    assert held_out_tasks(replace(plan, sample=99), recording, "shapes")[1] == all_tasks


# Searches


def test_quality_is_best_over_found_after_each_budget() -> None:
    """Plain columns take 1, 3, 5, 7, 9 microseconds; from the back, the best found is 9, 7, 5, 3, 1."""
    recording = recording_with()
    found = search_task(agent_of(Backwards), plain_task(recording), ReplayEvaluator(recording), (0, 1, 2, 4, 32))
    assert found == ([1 / 9, 1 / 9, 1 / 7, 1 / 3, 1.0], [True] * 5)


def test_a_failure_takes_a_measurement_and_a_choice_that_fails_counts_as_the_slowest() -> None:
    recording = recording_with({8: Status.WRONG, 6: Status.HANG})
    qualities, found = search_task(
        agent_of(Backwards), plain_task(recording), ReplayEvaluator(recording), (0, 1, 2, 3, 4)
    )
    assert qualities == [1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 3]  # the slowest that passed takes 5
    assert found == [False, False, True, True, True], "the choice after two is the next proposal, which passes"


def test_a_batch_is_answered_together() -> None:
    recording, heard = recording_with({8: Status.WRONG}), list[list[Status]]()

    class Listens(Backwards):
        def observe(self, evaluations: Sequence[Evaluation]) -> None:
            heard.append([e.status for e in evaluations])

    times = search_times(agent_of(Listens), plain_task(recording), ReplayEvaluator(recording), 4, 2)
    assert times == [None, 7.0, 5.0, 3.0] and heard == [[Status.WRONG, Status.PASSED], [Status.PASSED] * 2]

    class Twice(Backwards):
        def propose(self, *args: Any) -> list[KernelConfig]:
            return super().propose(*args)[:1] * 2

    with pytest.raises(UsageError, match="at most 2 different"):
        search_times(agent_of(Twice), plain_task(recording), ReplayEvaluator(recording), 4, 2)


def test_an_agent_of_every_legal_candidate_is_offered_what_the_recording_left_out() -> None:
    recording = recording_with({2: Status.LEFT_OUT, 8: Status.LEFT_OUT, 6: Status.ILLEGAL})
    task = plain_task(recording)
    assert task.left_out == (recording.catalogue[2], recording.catalogue[8])
    assert task.left_out_us == left_out_beyond(task.problem, recording.gpu) * task.best_us > task.best_us
    asked: list[set[KernelConfig]] = []

    class Every(Backwards):
        every_legal = True

        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            asked.append(set(candidates))
            return super().propose(problem, candidates, history, n)

    qualities, found = search_task(agent_of(Every), task, ReplayEvaluator(recording), (0, 2, 5))
    assert asked[0] == {*task.candidates, *task.left_out}
    assert qualities == [task.best_us / task.left_out_us, task.best_us / task.left_out_us, 1.0] and all(found)
    search_task(agent_of(Backwards), task, ReplayEvaluator(recording), (5,))
    assert make_agent("random-legal", 0, H200).every_legal and not make_agent("random", 0, H200).every_legal


def test_an_agent_that_stops_keeps_what_it_has() -> None:
    class Stops(Backwards):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            return [] if len(history) == 2 else super().propose(problem, candidates, history, n)

    class Never(Agent):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            return []

    recording = recording_with()
    replay, task = ReplayEvaluator(recording), plain_task(recording)
    assert search_task(agent_of(Stops), task, replay, (2, 4, 32))[0] == [1 / 7] * 3
    assert search_task(agent_of(Never), task, replay, (0, 4)) == ([1 / 9] * 2, [False] * 2)


def test_no_more_is_measured_than_the_largest_budget_and_one_at_a_time() -> None:
    asked: list[tuple[int, int]] = []
    told: list[int] = []

    class Spy(Backwards):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            asked.append((len(history), n))
            assert {launch_of(c) for c in candidates} == {"plain"}
            return super().propose(problem, candidates, history, n)

        def observe(self, evaluations: Sequence[Evaluation]) -> None:
            told.append(len(evaluations))

    recording = recording_with()
    search_task(agent_of(Spy), plain_task(recording), ReplayEvaluator(recording), (0, 3))
    assert asked == [(0, 1), (1, 1), (2, 1)] and told == [1, 1, 1]


@pytest.mark.parametrize("proposal", ["two", "again", "other launch"])
def test_an_agent_that_breaks_its_contract_is_refused(proposal: str) -> None:
    class Bad(Agent):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            stranger = next(c for c in recording.catalogue if c.pdl)
            return {"two": list(candidates[:2]), "again": [candidates[0]], "other launch": [stranger]}[proposal]

    recording = recording_with()
    with pytest.raises(UsageError, match="one offered, untried"):
        search_task(agent_of(Bad), plain_task(recording), ReplayEvaluator(recording), (4,))


# Units


def units_rows(unit: CompareUnit, plan: Plan, recording: Recording) -> dict[tuple[str, str], Any]:
    entries = list(run_unit(unit, plan, recording))
    return {(key, launch): (q, f) for entry in entries for key, launch, q, f in entry["tasks"]}


def test_prepare_sees_the_training_problems_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Learner(Backwards):
        def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
            seen.append((recording, tuple(problems)))

    monkeypatch.setattr(held_out, "make_agent", lambda name, seed, gpu: Learner(seed, gpu))
    full = recording_with()
    units_rows(CompareUnit("shapes", "x", 0), Plan("x", BUDGETS), full)
    split, _ = held_out_tasks(Plan("x", BUDGETS), full, "shapes")
    ((given, problems),) = seen
    assert problems == given.problems == split.training and not set(problems) & set(split.held_out)
    row, full_row = given.row(problems[1]), full.row(problems[1])
    np.testing.assert_array_equal(given.median_us[row], full.median_us[full_row])


def test_what_is_learned_in_one_task_helps_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that repeats what was best anywhere: with memory across tasks the second would start at the best."""

    class Remembers(Backwards):
        best: KernelConfig | None = None

        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            left = unexplored(candidates, history)
            return [self.best] if self.best in left else left[::-1][:1]  # type: ignore[list-item]

        def observe(self, evaluations: Sequence[Evaluation]) -> None:
            self.best = evaluations[0].config

    monkeypatch.setattr(held_out, "make_agent", lambda name, seed, gpu: Remembers(seed, gpu))
    recording, plan = recording_with(), Plan("x", (1, 5), 0.5)
    found = units_rows(CompareUnit("shapes", "x", 0), plan, recording)
    assert len(found) > 2 and all(q[0] < 1 and q[1] == 1 for q, _ in found.values())
    first, *_ = found
    rest = units_rows(CompareUnit("shapes", "x", 0, frozenset([first])), plan, recording)
    assert rest == {key: value for key, value in found.items() if key != first}
