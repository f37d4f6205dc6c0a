"""Tasks of a comparison of agents: held-out problems of a recording, searched one measurement at a time.

A task is a problem and a launch option. Every task starts from the prepared agent; answers of one task do not help in
another. So the quality after b measurements is due to b measurements. The result depends neither on the order of the
tasks nor on interruptions. Processes work off the units of a comparison and send what they finish.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from outblas.core.child_process import ChildProcess
from outblas.core.config import KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import DeviceError, OutblasError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.suites import sample
from outblas.tune.agents.agent_registry import check_agent, make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.agents.agent_file import FileAgent, check_agent_file, is_agent_file
from outblas_lab.compare.measured_cost import failure_ms, finished, measurement_ms, of_few_rounds, rounds_of_search
from outblas_lab.compare.splits import Split, arm_parts, make_split, parts_of
from outblas_lab.pool.record_suite import left_out_beyond
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator

#: Launch options that recordings have.
LAUNCHES: tuple[Launch, ...] = ("plain", "pdl")
#: Agents that read the answers from a recording of the very problems.
READS_THE_ANSWERS = ("recorded", "transfer")
#: Seconds of searching between two entries of the journal.
ENTRY_S = 1.0


@dataclass(frozen=True)
class HeldOutTask:
    """A search among the recorded candidates of one problem and one launch option.

    Attributes:
        candidates: recorded candidates that need exactly this option, passed or failed.
        best_us: time of the fastest candidate that passed, microseconds.
        worst_us: time of the slowest candidate that passed, microseconds.
        left_out: legal candidates of the catalogue that the recording left out, because a model predicted them to be
            slow. Candidates that were not chosen for this problem are not among them.
        left_out_us: time that each of these counts with: the fastest time by the factor beyond which they were left
            out. That flatters an agent that proposes them.
    """

    problem: Problem
    launch: Launch
    candidates: tuple[KernelConfig, ...]
    best_us: float
    worst_us: float
    left_out: tuple[KernelConfig, ...] = ()
    left_out_us: float = math.nan

    @property
    def key(self) -> tuple[str, str]:
        return self.problem.key, self.launch


@dataclass(frozen=True)
class CompareUnit:
    """The work of one process: all tasks of one split for one agent and seed.

    Attributes:
        agent: name of the agent, path of its file, or an arm (:mod:`outblas_lab.compare.splits`).
        done: (key of the problem, launch option) of the tasks that are left out, because they were done before.
    """

    split: str
    agent: str
    seed: int
    done: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Plan:
    """Settings that decide the tasks of a comparison and their answers.

    Attributes:
        budgets: numbers of measurements, ascending; the quality of the choice is noted after each.
        share: held-out share of the groups, see :func:`outblas_lab.compare.splits.make_split`.
        sample: number of held-out problems of each split, stratified by regime; None: all. Training is the same.
        across: name or path of another GPU's recording, from which agents may learn; None: only the judged GPU's.
        unit: unit of the budgets, a key of :data:`outblas_lab.compare.measured_cost.UNITS`.
    """

    recording: str
    budgets: tuple[int, ...]
    share: float = 0.2
    split_seed: int = 0
    sample: int | None = None
    across: str | None = None
    unit: str = "measurements"


def check_agents(agents: Sequence[str]) -> None:
    """Check the names of agents for a comparison; return None.

    Raises:
        UsageError: the list is empty, or a name is unknown or given twice. Also for a file that is no Python, and for
            ``recorded`` and ``transfer``, which would read the answers.
    """
    for name in agents:
        if is_agent_file(name):
            check_agent_file(Path(name))
        else:
            check_agent(name, "--agents")
        if name in READS_THE_ANSWERS:
            wrong = f"agent {name} knows the recorded answers"
            raise UsageError(wrong, "an agent that searches", "remove it from --agents")
    if not agents or len(set(agents)) != len(agents):
        raise UsageError(f"--agents is {','.join(agents)!r}", "one or more distinct agents", "correct --agents")


def held_out_tasks(plan: Plan, recording: Recording, name: str) -> tuple[Split, list[HeldOutTask]]:
    """Return a split of the recording, and the tasks of its held-out problems (of the plan's sample).

    The split is whole: the sample limits the tasks only. See :func:`tasks_of` for the tasks of a problem.

    Raises:
        UsageError: the recording cannot be split so, or no held-out problem has a task.
    """
    split = make_split(name, recording.problems, plan.share, plan.split_seed)
    problems: Sequence[Problem] = split.held_out
    if plan.sample is not None and plan.sample < len(problems):
        problems = sample(problems, plan.sample, plan.split_seed, gpu=recording.gpu)
    tasks = [task for problem in problems for task in tasks_of(recording, problem)]
    if not tasks:
        raise UsageError(f"split {name} has no held-out times", "a timed held-out problem", "pass another recording")
    return split, tasks


def tasks_of(recording: Recording, problem: Problem) -> list[HeldOutTask]:
    """Return the tasks of one recorded problem: one for each of ``plain`` and ``pdl`` with a candidate that passed.

    Kernels with early loads (option ``weights``) are in no task. The list may be empty.
    """
    row = recording.row(problem)
    beyond = left_out_beyond(problem, recording.gpu)
    by_catalogue = recording.chosen[row] == CHOICE_CODES["catalogue"]
    skipped = (recording.status[row] == STATUS_CODES[Status.LEFT_OUT]) & by_catalogue
    tasks = []
    for launch, columns in recording.by_launch(problem).items():
        if launch not in LAUNCHES:
            continue
        times = recording.median_us[row, columns][recording.status[row, columns] == STATUS_CODES[Status.PASSED]]
        if len(times):
            candidates = tuple(recording.catalogue[i] for i in columns)
            left_out = tuple(
                c for c, out in zip(recording.catalogue, skipped, strict=True) if out and launch_of(c) == launch
            )
            best_us, worst_us = float(times.min()), float(times.max())
            tasks.append(HeldOutTask(problem, launch, candidates, best_us, worst_us, left_out, beyond * best_us))
    return tasks


class _Measured(NamedTuple):
    """A proposal's kernel, its time as the agent saw it, and its recorded time, in microseconds; None if it failed."""

    config: KernelConfig
    seen_us: float | None
    us: float | None


def search_task(
    agent: Agent, task: HeldOutTask, evaluator: ReplayEvaluator, budgets: Sequence[int], unit: str = "measurements"
) -> tuple[list[float], list[bool]]:
    """Search one task: ask for one candidate at a time; tell the answer before asking for the next.

    The search ends at the last budget, or when the agent proposes nothing. Later budgets then repeat the last figure.

    Args:
        agent: proposes candidates. One whose ``every_legal`` is True is offered those that the recording left out, too.
            One with a method ``next_rounds`` chooses the rounds of each measurement, and may measure a candidate again
            (``examples/successive_halving.py``).
        unit: unit of the budgets, a key of :data:`outblas_lab.compare.measured_cost.UNITS`.

    Returns:
        Two lists, with an element for each budget. The first is the quality of the choice after that number of
        measurements: best time of the task / time of the choice, at most 1. With GPU time, those that end within it
        count. The choice is the fastest that passed, or the next proposal while none has. So with budget 0 it is the
        first proposal, unmeasured. A choice that failed, or none, counts as the slowest candidate. The second list
        says whether the choice passes.

    Raises:
        UsageError: the agent breaks its contract.
    """
    measured, ends = _search(agent, task, evaluator, budgets[-1], unit)
    found = [_choice(measured, finished(ends, budget, unit)) for budget in budgets]
    return [task.best_us / (task.worst_us if us is None else us) for us in found], [us is not None for us in found]


def search_times(
    agent: Agent, task: HeldOutTask, evaluator: ReplayEvaluator, measurements: int, batch: int = 1
) -> list[float | None]:
    """Search one task; return the time of each proposal in microseconds, in order, and None for one that failed.

    The search ends after ``measurements``, or when the agent proposes nothing. While none has passed, one proposal more
    is measured than that.

    Args:
        batch: candidates that are asked for at a time; the agent hears of their answers together.

    Raises:
        UsageError: the agent breaks its contract.
    """
    return [m.us for m in _search(agent, task, evaluator, measurements, "measurements", batch)[0]]


def _search(
    agent: Agent, task: HeldOutTask, evaluator: ReplayEvaluator, budget: int, unit: str, batch: int = 1
) -> tuple[list[_Measured], list[float]]:
    """Search one task; return what each proposal took, in order, and the GPU milliseconds until the end of each."""
    offered = (*task.candidates, *task.left_out) if agent.every_legal else task.candidates
    rounds_of: Callable[..., int] | None = getattr(agent, "next_rounds", None)
    history: list[Evaluation] = []
    measured: list[_Measured] = []
    ends: list[float] = []
    most = len(offered) * (1 if rounds_of is None else 2)
    while len(measured) < most:
        # While none has passed, the choice needs one proposal more than measurements.
        needed = budget + all(m.us is None for m in measured)
        if len(measured) >= needed if unit == "measurements" else bool(ends) and ends[-1] > budget:
            break
        proposed = agent.propose(task.problem, offered, history, batch)
        if not proposed:
            break
        tried = set() if rounds_of is not None else {evaluation.config for evaluation in history}
        known = all(config in offered and config not in tried for config in proposed)
        if len(proposed) > batch or len(set(proposed)) < len(proposed) or not known:
            wrong = f"agent {agent.name!r} proposed {[config_name(c) for c in proposed]} for {task.problem.key}"
            number = "one" if batch == 1 else f"at most {batch} different"
            raise UsageError(wrong, f"{number} offered, untried candidate(s) per call", "correct the agent")
        answers = []
        for config in proposed:
            evaluation, us, cost = _measure(task, config, evaluator, rounds_of, agent.seed, history, measured)
            answers.append(evaluation)
            measured.append(_Measured(config, evaluation.timing.median_us if evaluation.timing else us, us))
            ends.append((ends[-1] if ends else 0.0) + cost)
        history += answers
        agent.observe(answers)
    return measured, ends


def _measure(
    task: HeldOutTask, config: KernelConfig, evaluator: ReplayEvaluator, rounds_of: Callable[..., int] | None,
    seed: int, history: Sequence[Evaluation], measured: Sequence[_Measured],
) -> tuple[Evaluation, float | None, float]:  # fmt: skip
    """Return the evaluation of a candidate, its recorded time in microseconds, and the GPU milliseconds it took."""
    evaluation, us = _answer(task, config, evaluator)
    if us is None:
        return evaluation, None, failure_ms(task.worst_us)
    before = [e for e in history if e.config == config]
    best_us = min((m.us for m in measured if m.us is not None), default=math.inf)
    rounds = rounds_of_search(task.problem, evaluator.gpu, us, best_us)
    if rounds_of is not None:
        rounds = rounds_of(task.problem, config, tuple(history))
        earlier = before[-1].timing.samples_us if before and before[-1].timing is not None else ()
        evaluation = of_few_rounds(evaluator.recording, evaluation, rounds, earlier, seed)
    return evaluation, us, measurement_ms(task.problem, evaluator.gpu, us, rounds, bool(before))


def _answer(task: HeldOutTask, config: KernelConfig, evaluator: ReplayEvaluator) -> tuple[Evaluation, float | None]:
    """Return the evaluation of a candidate, and its time in the comparison; None if it failed."""
    if config in task.left_out:
        return Evaluation(task.problem, config, Status.LEFT_OUT, "left out of the recording"), task.left_out_us
    (evaluation,) = evaluator.evaluate([(task.problem, config)])
    return evaluation, evaluation.timing.median_us if evaluation.timing else None


def _choice(measured: Sequence[_Measured], count: int) -> float | None:
    """Return the time of the choice after ``count`` measurements; None if it failed or nothing is left."""
    passed = {m.config: m for m in measured[:count] if m.us is not None}  # the last of those with more rounds
    if passed:
        return min(passed.values(), key=lambda m: m.seen_us or math.inf).us
    return measured[count].us if count < len(measured) else None


def run_unit(
    unit: CompareUnit, plan: Plan, recording: Recording, other: Recording | None = None
) -> Iterator[dict[str, Any]]:
    """Prepare the agent on the training problems and search the held-out tasks.

    Yields:
        Journal entries, about one a second; none if no task is left. Keys: ``split``, ``agent``, ``seed``,
        ``prepare_s`` (CPU seconds; None after the first), ``seconds`` (of CPU, searching) and ``tasks``. ``tasks`` has
        [problem key, launch, qualities, found] of each that was finished since the entry before.

    Raises:
        UsageError: the agent breaks its contract, or the recording cannot be split so.
        ToolchainMissing: it needs a package that is not installed.
    """
    split, tasks = held_out_tasks(plan, recording, unit.split)
    tasks = [task for task in tasks if task.key not in unit.done]
    name, source = arm_parts(unit.agent)
    is_file, evaluator = is_agent_file(name), ReplayEvaluator(recording)
    agent = FileAgent(Path(name), unit.seed, recording.gpu) if is_file else make_agent(name, unit.seed, recording.gpu)
    parts = parts_of(source, split, recording, other)
    start = time.process_time()
    agent.prepare_across(parts)
    cpu = time.process_time()
    prepare_s: float | None = cpu - start
    head = {"split": unit.split, "agent": unit.agent, "seed": unit.seed}
    learns = type(agent).observe is not Agent.observe
    began, finished = time.monotonic(), list[list[Any]]()
    for task in tasks:
        searcher = copy.deepcopy(agent, {id(part.recording): part.recording for part in parts}) if learns else agent
        finished.append([*task.key, *search_task(searcher, task, evaluator, plan.budgets, plan.unit)])
        if time.monotonic() - began > ENTRY_S or task is tasks[-1]:
            now = time.process_time()
            yield {**head, "prepare_s": prepare_s, "seconds": now - cpu, "tasks": finished}
            began, cpu, finished, prepare_s = time.monotonic(), time.process_time(), [], None


#: Seconds without an answer after which a watcher hears of it.
HEARTBEAT_S = 30.0


class Watch(NamedTuple):
    """Callbacks on units at work.

    Attributes:
        begun: called with a unit when a process begins it.
        waiting: called after each 30 s (:data:`HEARTBEAT_S`) without an answer. It gets the list of units at work and
            the seconds since the start.
    """

    begun: Callable[[CompareUnit], None]
    waiting: Callable[[Sequence[CompareUnit], float], None]


def run_units(
    units: Sequence[CompareUnit], plan: Plan, jobs: int, watch: Watch | None = None
) -> Iterator[dict[str, Any]]:
    """Yield entries of :func:`outblas_lab.compare.held_out.run_unit` as they finish, in any order of units.

    A generator: it starts processes at the first ``next``, and ends them when it is closed. The answers do not depend
    on ``jobs``: packages that use threads of their own get one.

    Args:
        jobs: processes, one unit each at a time; at most one a unit is started.
        watch: hears of begun units and of silence; None: nobody does.

    Raises:
        OutblasError: as a unit raised it.
        RuntimeError: a unit failed otherwise; its traceback is on stderr.
        DeviceError: a process died.
    """
    waiting, workers = deque(units), dict[Connection, ChildProcess]()
    at_work: dict[Connection, CompareUnit] = {}
    begin = time.monotonic()

    def send(connection: Connection) -> None:
        at_work[connection] = unit = waiting.popleft()
        connection.send(unit)
        if watch is not None:
            watch.begun(unit)

    try:
        for _ in range(min(jobs, len(waiting))):
            child = ChildProcess(_work, (plan,))
            workers[child.connection] = child
            send(child.connection)
        while workers:
            ready = wait(list(workers), HEARTBEAT_S)
            if not ready and watch is not None:
                watch.waiting(list(at_work.values()), time.monotonic() - begin)
            for connection in ready:
                assert isinstance(connection, Connection)
                message = _receive(connection, workers[connection], at_work[connection])
                if message is not None:
                    yield message
                elif waiting:
                    send(connection)
                else:
                    at_work.pop(connection)
                    workers.pop(connection).end(kill=False)
    finally:
        for child in workers.values():
            child.end(kill=True)


def _receive(connection: Connection, child: ChildProcess, unit: CompareUnit) -> dict[str, Any] | None:
    """An entry, or None at a unit's end; what the unit raised is raised."""
    try:
        message = connection.recv()
    except (EOFError, OSError):
        raise DeviceError(
            f"a worker process died with exit code {child.exit_code()} on agent {unit.agent}",
            "enough memory for every job, and an agent that does not end its process",
            "rerun the command with fewer --jobs; it resumes",
        ) from None
    if isinstance(message, BaseException):
        raise message
    assert message is None or isinstance(message, dict)
    return message


def _work(connection: Connection, plan: Plan) -> None:
    """A process's life."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported
    recording = other = None
    with contextlib.suppress(EOFError, OSError):  # the parent has nothing more, or is gone
        while True:
            unit: CompareUnit = connection.recv()
            try:
                recording = recording or Recording.load(plan.recording)
                other = other or (None if plan.across is None else Recording.load(plan.across))
                for entry in run_unit(unit, plan, recording, other):
                    connection.send(entry)
                connection.send(None)
            except OutblasError as error:
                connection.send(error)
                return
            except (EOFError, BrokenPipeError):
                return
            except Exception as error:
                traceback.print_exc()
                connection.send(RuntimeError(f"agent {unit.agent} failed: {type(error).__name__}: {error}"))
                return
