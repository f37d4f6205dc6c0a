"""The work on one problem of a live comparison: all searches, then the judgement; its entry in the journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import regime
from outblas.records.provenance import source_commit
from outblas.search.agents.base import Agent
from outblas.search.live_compare.arm_search import ArmSearch, Pick, search_in_step
from outblas.search.live_compare.live_arms import LiveArm
from outblas.search.live_compare.live_bench import LiveBench, judged_choices
from outblas.search.live_compare.shared_measurements import SharedMeasurements


@dataclass(frozen=True)
class LiveSearches:
    """The searches of every problem.

    Attributes:
        runs: (arm, agent), one for each arm and seed.
        offered: returns the candidates of a space for a problem.
        budgets: numbers of measurements, ascending.
    """

    runs: Sequence[tuple[LiveArm, Agent]]
    offered: Callable[[str, Problem], Sequence[KernelConfig]]
    budgets: Sequence[int]

    def begin(self, problem: Problem) -> list[ArmSearch]:
        """Return new searches of a problem."""
        spaces = {space: self.offered(space, problem) for space in dict.fromkeys(arm.space for arm, _ in self.runs)}
        return [ArmSearch(arm, agent, problem, spaces[arm.space]) for arm, agent in self.runs]


def compare_problem(
    problem: Problem, searches: LiveSearches, bench: LiveBench, shared: SharedMeasurements,
    step_done: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """Search a problem with all arms, judge their choices together, and return the entry of the journal.

    Args:
        problem: the problem.
        searches: arms, seeds and numbers of measurements.
        bench: its judge is used; its other evaluator is that of ``shared``.
        shared: measures for all searches.
        step_done: called after each step of the searches, and after the judgement.

    Returns:
        JSON values. ``problem`` and its ``regime``; ``picks``, see
            :class:`outblas.search.live_compare.arm_search.Pick`; ``judged``, see
            :func:`outblas.search.live_compare.live_bench.judged_choices`. ``kernels`` (number that any
            agent asked), ``gpu_s``, ``cpu_s`` (arm -> seconds) and ``commit``.
    """
    begun, before = searches.begin(problem), shared.seconds
    asked: dict[KernelConfig, Evaluation] = {}

    def measure(configs: Collection[KernelConfig]) -> Mapping[KernelConfig, Evaluation]:
        asked.update(answers := shared.of(problem, configs))
        return answers

    search_in_step(begun, measure, searches.budgets[-1], step_done)
    picks = [pick for search in begun for pick in search.picks(searches.budgets)]
    chosen = list(dict.fromkeys(pick.config for pick in picks if pick.config is not None))
    judged = judged_choices(problem, chosen, bench.judge)
    step_done()
    cpu_s: dict[str, float] = defaultdict(float)
    for search in begun:
        cpu_s[str(search.arm)] += search.cpu_s
    return {
        "problem": problem.key,
        "regime": regime(problem, bench.judge.gpu),
        "picks": [_plain(pick) for pick in picks],
        "judged": judged,
        "kernels": len(asked),
        "gpu_s": shared.seconds - before + judged["seconds"],
        "cpu_s": cpu_s,
        "commit": source_commit(),
    }


def _plain(pick: Pick) -> list[Any]:
    name = "" if pick.config is None else config_name(pick.config)
    return [pick.arm, pick.seed, pick.budget, pick.measurements, name]


def why_left_out(entry: Mapping[str, Any]) -> str:
    """Return why a problem has no figures, in words; an empty text if it has some."""
    judged = entry["judged"]
    if judged["kernels"]:
        return ""
    failed = ", ".join(sorted(set(judged["failed"].values())))
    return f"no choice could be judged ({failed})" if failed else "no agent found a kernel that passed"


def rows_of_entry(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a problem in the result file; none if it was left out.

    A choice that could not be judged counts as the slowest kernel that was judged.
    """
    judged = entry["judged"]["kernels"]
    if not judged:
        return
    best = max(kernel["speedup"] for kernel in judged.values())
    slowest = min(judged.values(), key=lambda kernel: kernel["speedup"])
    for arm, seed, budget, measurements, name in entry["picks"]:
        agent, _, space = arm.rpartition("@")
        kernel = judged.get(name, slowest)
        yield {
            "arm": arm, "agent": agent, "space": space, "seed": seed, "problem": entry["problem"],
            "regime": entry["regime"], "budget": budget, "measurements": measurements, "config": name,
            "found": name in judged,
            **{key: kernel[key] for key in ("speedup", "low", "high", "us", "baseline", "baseline_us")},
            "share": kernel["speedup"] / best,
        }  # fmt: skip
