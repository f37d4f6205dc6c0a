"""Modelled GPU time as a budget, and agents that choose the rounds of a measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.tune.agents.base import Agent, unexplored
from outblas_lab.agents.agent_file import FileAgent
from outblas_lab.compare.compare_result import read_comparison, seed_half_widths
from outblas_lab.compare.held_out import HeldOutTask, _search, search_task, tasks_of
from outblas_lab.compare.measured_cost import failure_ms, finished, measurement_ms, of_few_rounds, rounds_of_search
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.bench_fixture import write_made
from support.cli_fixture import outblas
from support.gpus.known import H200
from support.helpers import synthetic_recording

SMALL, LARGE = Problem(64, 64, 64), Problem(8192, 8192, 8192)
HALVING = Path(__file__).parents[2] / "examples" / "successive_halving.py"


def made(failed: Sequence[int] = (), candidates: int = 10) -> Recording:
    """Candidate c takes c + 1 microseconds on every problem."""
    given = synthetic_recording(candidates=candidates)
    status = np.full(given.status.shape, STATUS_CODES[Status.PASSED], np.int8)
    status[:, list(failed)] = STATUS_CODES[Status.WRONG]
    passed = status == STATUS_CODES[Status.PASSED]
    times = np.broadcast_to(np.arange(1, candidates + 1, dtype=np.float32), status.shape)
    return replace(
        given, status=status, median_us=np.where(passed, times, np.nan).astype(np.float32),
        spread=np.where(passed, 0.01, np.nan).astype(np.float32), rounds=np.where(passed, 5, 0).astype(np.int16),
    )  # fmt: skip


class Listed(Agent):
    """The candidates as they are listed: the fastest first, in ``made``."""

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return unexplored(candidates, history)[:n]


def task_of(recording: Recording) -> HeldOutTask:
    return tasks_of(recording, recording.problems[0])[0]


def test_a_measurement_is_its_calls_before_the_graph_and_its_graph_once_more_than_its_rounds() -> None:
    assert measurement_ms(SMALL, H200, 10.0, 5) == pytest.approx(10e-3 * (3 + 32 * 6))
    assert measurement_ms(SMALL, H200, 10.0, 4, again=True) == pytest.approx(10e-3 * 32 * 5)
    assert measurement_ms(LARGE, H200, 2000.0, 3) == pytest.approx(2.0 * (3 + 4))


def test_a_kernel_far_behind_the_best_so_far_has_one_round() -> None:
    assert [rounds_of_search(SMALL, H200, us, 4.0) for us in (3.0, 5.0, 5.01)] == [5, 5, 1]
    assert rounds_of_search(LARGE, H200, 1e9, float("inf")) == 3


def test_a_budget_of_gpu_time_holds_what_ends_within_it() -> None:
    assert [finished([2.0, 5.0, 9.0], budget, "gpu-ms") for budget in (0, 1, 2, 8, 9, 100)] == [0, 0, 1, 2, 3, 3]
    assert finished([2.0], 7, "measurements") == 7


def test_a_search_ends_with_its_gpu_time_and_slow_kernels_cost_more() -> None:
    recording = made()
    task, replay = task_of(recording), ReplayEvaluator(recording)
    times = [us for us in range(1, 11, 2)]  # plain candidates
    costs = [measurement_ms(task.problem, H200, us, 5 if us == 1 else 1) for us in times]
    budgets = (0, 1, 1000)

    class Backwards(Listed):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            return unexplored(candidates, history)[::-1][:n]

    found = search_task(Backwards(0, H200), task, replay, budgets, "gpu-ms")
    # The slowest takes 9 us and five rounds: none is better within 1 ms.
    assert measurement_ms(task.problem, H200, 9.0, 5) > 1 > costs[0]
    assert found == ([1 / 9, 1 / 9, 1.0], [True] * 3)
    assert search_task(Listed(0, H200), task, replay, budgets, "gpu-ms")[0] == [1.0] * 3


def test_a_search_in_which_all_fail_ends_within_any_gpu_time() -> None:
    recording = made(range(2, 10, 2))
    task, replay = task_of(recording), ReplayEvaluator(recording)

    class Backwards(Listed):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            return [c for c in unexplored(candidates, history)[::-1] if c != task.candidates[0]][:n]

    assert search_task(Backwards(0, H200), task, replay, (1, 10), "gpu-ms") == ([1.0, 1.0], [False, False])


def test_failed_kernels_use_up_gpu_time() -> None:
    """Else an agent could try kernels that fail without end, and the measurements of the others would cost it more."""
    recording = made((2, 4))
    task, replay = task_of(recording), ReplayEvaluator(recording)

    class FailsFirst(Listed):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            failing = [c for c in task.candidates if replay.evaluate([(task.problem, c)])[0].timing is None]
            return unexplored([*failing, *candidates], history)[:n]

    right = measurement_ms(task.problem, H200, 1.0, 5)
    assert failure_ms(task.worst_us) == pytest.approx(3 * 9e-3)
    agent, waited = FailsFirst(0, H200), 2 * failure_ms(task.worst_us)
    _, ends = _search(agent, task, replay, 1000, "gpu-ms")
    assert ends[:3] == pytest.approx([waited / 2, waited, waited + right])


def test_few_rounds_are_drawn_around_the_recorded_median() -> None:
    recording = made((3,))
    task, replay = task_of(recording), ReplayEvaluator(recording)
    (passed,) = replay.evaluate([(task.problem, recording.catalogue[4])])
    one = of_few_rounds(recording, passed, 1, (), 0)
    assert one == of_few_rounds(recording, passed, 1, (), 0) and one.timing is not None
    assert one != of_few_rounds(recording, passed, 1, (), 1), "each seed has samples of its own"
    assert one.timing.median_us != 5.0 and one.timing.median_us == pytest.approx(5.0, rel=0.05)
    more = of_few_rounds(recording, passed, 1000, one.timing.samples_us, 0)
    assert more.timing is not None and more.timing.samples_us[:1] == one.timing.samples_us
    assert len(more.timing.samples_us) == 1001 and np.median(more.timing.samples_us) == pytest.approx(5.0, rel=0.002)
    seen = [of_few_rounds(recording, passed, n, one.timing.samples_us, 0).timing for n in (3, 4)]
    assert [t is not None and t.median_us == 5.0 for t in seen] == [False, True], "5 rounds show what others see"
    assert one.speedup is not None and passed.speedup is not None
    assert one.speedup.ratio * one.timing.median_us == pytest.approx(passed.speedup.ratio * 5.0)
    (failed,) = replay.evaluate([(task.problem, recording.catalogue[3])])
    assert of_few_rounds(recording, failed, 1, (), 0) is failed


def test_a_cell_of_one_round_takes_the_spread_of_the_others() -> None:
    recording = made()
    recording.rounds[0, 4], recording.spread[0, 4] = 1, 0.0
    (passed,) = ReplayEvaluator(recording).evaluate([(recording.problems[0], recording.catalogue[4])])
    drawn = of_few_rounds(recording, passed, 200, (), 0).timing
    assert drawn is not None and 0.005 < np.std(np.log(drawn.samples_us)) < 0.01  # 0.01 / 1.349


def test_successive_halving_gives_more_rounds_to_a_quarter() -> None:
    recording = made(candidates=48)
    task, agent = task_of(recording), FileAgent(HALVING, 0, H200)
    seen: list[Evaluation] = []

    class Watched(Agent):
        name = "watched"

        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            seen[:] = history
            return agent.propose(problem, candidates, history, n)

        def next_rounds(self, *asked: Any) -> int:
            assert agent.next_rounds is not None
            return agent.next_rounds(*asked)

    found = search_task(Watched(0, H200), task, ReplayEvaluator(recording), (1000,))
    assert found == ([1.0], [True])
    counts = Counter(e.config for e in seen)
    twice = [c for c, count in counts.items() if count == 2]
    assert len(counts) == 24 and 6 <= len(twice) <= 12 and max(counts.values()) == 2
    assert {len(e.timing.samples_us) for e in seen if e.timing is not None} == {1, 5}
    slowest = [c for c in task.candidates if c not in twice]
    assert task.candidates[0] in twice and task.candidates[-1] in slowest


@pytest.mark.parametrize("answer", ["0", "1001", "'1'"])
def test_rounds_of_a_file_are_checked(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HALVING.read_text().replace("return MORE if any", f"return {answer} if True or any"))
    with pytest.raises(UsageError, match="next_rounds returned"):
        search_task(FileAgent(path, 0, H200), task_of(made()), ReplayEvaluator(made()), (4,))


def test_only_an_agent_that_chooses_rounds_may_measure_again() -> None:
    class Again(Agent):
        def propose(self, problem: Any, candidates: Any, history: Any, n: int) -> list[KernelConfig]:
            return list(candidates[:1])

    with pytest.raises(UsageError, match="one offered, untried candidate"):
        search_task(Again(0, H200), task_of(made()), ReplayEvaluator(made()), (4,))


def test_an_interval_over_seeds_is_that_of_their_means(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", {"good": 0.1, "bad": 1.0})
    widths = seed_half_widths(c, "shapes")
    mine = (c.split == 0) & (c.agent == 0) & (c.budget == 1)
    means = [np.exp(np.log(c.quality[mine & (c.seed == seed)]).mean()) for seed in np.unique(c.seed)]
    factor = {2: 12.706, 3: 4.303}[len(means)]
    expected = factor * np.std(means, ddof=1) / len(means) ** 0.5
    assert widths["good", c.budgets[1]] == pytest.approx(expected, abs=1e-6)


def test_the_command_compares_at_equal_gpu_time(tmp_path: Path) -> None:
    recording, out = tmp_path / "recording", tmp_path / "c.parquet"
    made().write(recording)
    command = ["compare", "--agents", f"random,{HALVING}", "--splits", "shapes", "--seeds", "2", "--out", str(out)]
    command += ["--device", f"replay:{recording}", "--budgets", "0,1,5"]
    said = outblas(*command, "--unit", "gpu-ms")
    assert said.exit_code == 0, said.output
    assert "5 ms" in said.output and "over seeds: random ±" in said.output
    assert read_comparison(out).unit == "gpu-ms"
    assert outblas(*command, "--unit", "gpu-s").exit_code == 2
    assert "other settings" in outblas(*command).output
