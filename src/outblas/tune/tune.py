"""The main job: an agent searches many problems within a budget; every answer is recorded and winners are kept.

A resumed run asks the agent from the start again; the store answers the pairs that it holds. So a killed and resumed
run ends with the result of an uninterrupted one, if the agent keeps its contract.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_allows
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, fastest_baseline
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow, choose_kernel, runs_instead_of_torch
from outblas.records.store import Store
from outblas.tune.agents.base import Agent

#: Problems searched side by side, and candidates asked of the agent at once for each. Their product is one batch: it
#: keeps several GPUs and compilers busy, and an agent still learns between batches.
PROBLEMS_AT_ONCE = 64
CANDIDATES_PER_ROUND = 4

#: Called as (measurements done, of how many, geometric mean of the best speed-ups so far).
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search: the distribution of its measurements and an early end.

    Attributes:
        per_round: candidates asked of the agent at once for each problem. An agent that learns nothing may be asked for
            the whole budget: each problem is then set up and its baselines timed once.
        budgets: measurements of single problems, in place of the common budget; other problems keep the common one.
        stop: called after every new measurement; True ends the search. The library then has the problems tried so far.
        at_once: problems searched side by side. A small number finishes the first ones before a stop.
        finished: called with the evaluations of each problem that was searched, once its search has ended.
        launch: launch option that the caller's calls allow; other kernels are not searched. By default all are.
    """

    per_round: int = CANDIDATES_PER_ROUND
    budgets: Mapping[Problem, int] | None = None
    stop: Callable[[], bool] = lambda: False
    at_once: int = PROBLEMS_AT_ONCE
    finished: Callable[[Sequence[Evaluation]], None] = lambda evaluations: None
    launch: Launch = "weights"


class Interrupted(KeyboardInterrupt):
    """An error: Ctrl-C in the middle of a run. The message says what is safe and how to go on."""


def tune(
    problems: Sequence[Problem],
    agent: Agent,
    budget: int,
    evaluator: Evaluator,
    store: Store,
    run_id: str,
    progress: Progress | None = None,
    options: SearchOptions | None = None,
) -> Library:
    """Search every problem and return the winners.

    Args:
        problems: the problems to tune; each once.
        budget: measurements per problem at most (of all candidates, if a problem has fewer).
        evaluator: answers the proposals; must be the same when a run is resumed.
        store: keeps every evaluation before the next is asked; recorded ones are not measured again.
        run_id: name of the run in the store; an existing run is resumed.
        progress: called after every measurement, recorded ones included. It gets the number done, the number of all,
            and the geometric mean of the best speed-ups so far. A problem without a sure win counts as 1.
        options: settings of the search; None: the defaults of :class:`SearchOptions`.

    Returns:
        A library with one row a problem, in the order of ``problems``. A row without a winner falls back to the
        baseline. After a stop, problems without an evaluation have no row.

    Raises:
        UsageError: a budget is below 1, a problem is given twice, the run was started with other settings, or the agent
            breaks its contract.
        RecordError: the store cannot be written; earlier records are intact.
        Interrupted: Ctrl-C.
    """
    options = options or SearchOptions()
    budgets = options.budgets or {}
    least = min((budget, *budgets.values()))
    if least < 1:
        raise UsageError(f"budget is {least}", "1 or more measurements per problem", "pass a larger --budget")
    if len(set(problems)) != len(problems):
        raise UsageError("a problem is given twice", "each problem once", "remove the duplicate")
    store.begin(run_id, {"agent": agent.name, "seed": agent.seed, "source": evaluator.source})
    offered = {
        problem: [config for config in configs if launch_allows(options.launch, config)]
        for problem, configs in evaluator.candidates_of(problems).items()
    }
    allowed = {problem: budgets.get(problem, budget) for problem in problems}
    wanted = {p: min(allowed[p], len(configs)) for p, configs in offered.items()}
    score = _Score(sum(wanted.values()), len(problems), progress)
    rows: list[LibraryRow] = []
    try:
        for start in range(0, len(problems), options.at_once):
            # Without what was profiled since: a resumed agent must see what it saw.
            known = {
                p: {e.template: e for e in store.recorded(run_id, p, profiled=False).values()}
                for p in problems[start:][: options.at_once]
            }
            group = [_Search(p, offered[p], known[p], allowed[p]) for p in known]
            evaluator.expect([search.problem for search in group])
            stopped = _search(group, agent, evaluator, store, run_id, score, options)
            rows += [decided_row(s.problem, s.history, evaluator) for s in group if s.history or not stopped]
            for search in group:
                options.finished(search.history)
            store.sync()
            if stopped:
                break
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted with {_recorded(store, run_id, wanted)} of {score.total} measurements of {len(problems)} "
            f"problem{'s' * (len(problems) != 1)}; they are saved in {store.path} under run ID {run_id}"
        ) from error
    provenance = {"run": run_id, "agent": agent.name, "seed": agent.seed, "budget": budget, "source": evaluator.source}
    return Library(evaluator.gpu.name, tuple(rows), provenance)


def _recorded(store: Store, run_id: str, wanted: Mapping[Problem, int]) -> int:
    """Return how many of the measurements that a search wants are recorded. The run may have other problems, too."""
    found = Counter(problem for problem, _ in store.recorded_pairs(run_id))
    return sum(min(found[problem.key], most) for problem, most in wanted.items())


class _Search:
    """State of one problem's search: candidates, evaluations of this session, and the store's earlier evaluations."""

    def __init__(
        self, problem: Problem, candidates: list[KernelConfig], known: dict[KernelConfig, Evaluation], budget: int
    ) -> None:
        self.problem, self.candidates, self.known, self.budget = problem, candidates, known, budget
        self.allowed = set(candidates)
        self.history: list[Evaluation] = []
        self.finished = False

    def ask(self, agent: Agent, per_round: int) -> list[KernelConfig]:
        """The agent's next proposals, held to its contract."""
        n = min(per_round, min(self.budget, len(self.candidates)) - len(self.history))
        if self.finished or n < 1:
            return []
        proposed = agent.propose(self.problem, self.candidates, self.history, n)
        fresh = set(proposed) - {e.config for e in self.history}
        if len(proposed) > n or len(fresh) != len(proposed) or not fresh <= self.allowed:
            raise UsageError(
                f"agent {agent.name!r} proposed {[config_name(c) for c in proposed]} for {self.problem.key}",
                f"at most {n} different candidates that are legal and not tried yet",
                "correct the agent",
            )
        self.finished = not proposed
        return proposed


class _Score:
    """Counts measurements and keeps the running geometric mean; a problem without a win counts as 1."""

    def __init__(self, total: int, problems: int, progress: Progress | None) -> None:
        self.done, self.total, self._problems, self._progress = 0, total, problems, progress
        self._best: dict[Problem, float] = {}
        self._sum = 0.0

    def add(self, e: Evaluation) -> None:
        self.done += 1
        if e.status is Status.PASSED and e.speedup is not None and e.speedup.low > 1:
            gain, was = math.log(e.speedup.ratio), self._best.get(e.problem, 0.0)
            if gain > was:
                self._best[e.problem] = gain
                self._sum += gain - was
        if self._progress is not None:
            self._progress(self.done, self.total, math.exp(self._sum / self._problems))


def _search(
    group: list[_Search],
    agent: Agent,
    evaluator: Evaluator,
    store: Store,
    run_id: str,
    score: _Score,
    options: SearchOptions,
) -> bool:
    """Rounds of ask, evaluate, record, tell, until no problem of the group has proposals left, or a stop (True)."""
    while True:
        asked: list[tuple[_Search, list[KernelConfig]]] = []
        answers: dict[tuple[Problem, KernelConfig], Evaluation] = {}
        pending = _pending(group, agent, options.per_round, asked, answers, score)
        stopped = False
        with closing_evaluations(evaluator.evaluate(pending)) as evaluations:
            for evaluation in evaluations:
                store.append(run_id, evaluation)
                answers[evaluation.problem, evaluation.template] = evaluation
                score.add(evaluation)
                if stopped := options.stop():
                    break
        if stopped:
            for search, configs in asked:
                search.history += [answers[search.problem, c] for c in configs if (search.problem, c) in answers]
            return True
        if not any(configs for _, configs in asked):
            return False
        batch: list[Evaluation] = []
        for search, configs in asked:
            new = [answers[search.problem, config] for config in configs]
            search.history += new
            batch += new
        agent.observe(batch)


def _pending(
    group: list[_Search],
    agent: Agent,
    per_round: int,
    asked: list[tuple[_Search, list[KernelConfig]]],
    answers: dict[tuple[Problem, KernelConfig], Evaluation],
    score: _Score,
) -> Iterator[tuple[Problem, KernelConfig]]:
    """Ask the agent problem by problem, while the evaluator takes more, and yield the pairs that the store lacks.

    All proposals of a round come before the agent observes any answer of it. So they do not depend on answer times.
    """
    for search in group:
        configs = search.ask(agent, per_round)
        asked.append((search, configs))
        for config in configs:
            if config in search.known:
                answers[search.problem, config] = search.known[config]
                score.add(search.known[config])
            else:
                yield search.problem, config


def decided_row(problem: Problem, tried: Sequence[Evaluation], evaluator: Evaluator) -> LibraryRow:
    """Return the decision for a problem, with the baselines that were timed beside the candidates.

    Args:
        tried: evaluations of its candidates. Without baselines in them, the evaluator times them.
        evaluator: names the baselines' algorithms.
    """
    baselines = next((e.baselines_us for e in tried if e.baselines_us), None)
    times = evaluator.baselines(problem) if baselines is None else baselines
    plain, pdl, weights = (choose_kernel(tried, launch) for launch in LAUNCHES)
    winner = next((e for c in (plain, pdl, weights) if c for e in tried if e.config == c.config), None)
    if winner is not None and winner.speedup is not None:
        name = winner.speedup.baseline
    else:
        name = fastest_baseline(times) if times else ""
    detail, auto = (evaluator.baseline_detail(problem, one) if one in times else "" for one in (name, LT_AUTO))
    if name in (LT_AUTO, LT_HEURISTIC):
        detail, auto = detail if runs_instead_of_torch(times.get(name), times.get("torch")) else "", ""
    elif not runs_instead_of_torch(times.get(LT_AUTO), times.get("torch")):
        auto = ""
    nearest = None if plain is not None else choose_kernel(tried, "plain", above=0.0)
    weights = None if weights == pdl else weights
    return LibraryRow(problem, name, detail, evaluator.source, plain, pdl, auto, weights, nearest=nearest)
