"""A live comparison on disk: from its settings, through a store and a journal, to its result file."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outblas.bench.share_gpus import entries_of_gpus
from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.journal import Journal, check_same_settings
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.parquet import check_parquet
from outblas.records.proved_kernels import built_by
from outblas.records.provenance import collect_provenance
from outblas.records.recording import Recording
from outblas.records.recording_hash import recording_sha
from outblas.records.replay import ReplayEvaluator
from outblas.records.store import Store
from outblas.runtime.device import Device, gpu_of_device, require_gpus
from outblas.search.agents.agent_registry import make_agent
from outblas.search.agents.base import Agent
from outblas.search.agents.knob import KNOB_POLICY_VARIABLE
from outblas.search.agents.ppo import POLICY_VARIABLE
from outblas.search.compare.compare_run import about_recording
from outblas.search.live_compare import live_bench
from outblas.search.live_compare.live_arms import LiveArm, live_arms, ready_agent, space_candidates
from outblas.search.live_compare.live_plan import RunBudget, plan_lines
from outblas.search.live_compare.live_result import read_live, write_live
from outblas.search.live_compare.problem_entry import LiveSearches, compare_problem, rows_of_entry, why_left_out
from outblas.search.live_compare.shared_measurements import SharedMeasurements
from outblas.search.live_compare.unseen_problems import rehearsed_problems, unseen_problems
from outblas.search.tune import Interrupted

#: Largest number of measurements of a search, of seeds and of problems: more would take weeks of a GPU.
MAX_BUDGET, MAX_SEEDS, MAX_PROBLEMS = 1000, 100, 10_000
#: Called as (steps done, all steps, words). A step is one question to every agent, or a judgement.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LiveSettings:
    """Settings that decide the result.

    Attributes:
        agents: names of agents of the registry, each once.
        space: the candidates of the first table, a key of :data:`outblas.search.live_compare.live_arms.SPACES`.
        native: True searches in the agents' own spaces, too, for the second table.
        budgets: numbers of measurements after which choices are judged, ascending.
        seeds: every agent that draws runs with the seeds 0 .. ``seeds`` - 1, the others with 0 only.
        problems: number of problems.
        problem_seed: seed of their draw.
        layout: layout of the problems, ``TN`` or ``NN``.
        dtype: dtype of the problems, ``fp16`` or ``bf16``.

    Raises:
        UsageError: a number is out of its range, or the budgets do not ascend.
    """

    agents: tuple[str, ...]
    space: str = "pool"
    native: bool = True
    budgets: tuple[int, ...] = (4, 8, 16, 32)
    seeds: int = 3
    problems: int = 40
    problem_seed: int = 0
    layout: str = "TN"
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        budgets = list(self.budgets)
        if not budgets or budgets[0] < 1 or budgets != sorted(set(budgets)) or budgets[-1] > MAX_BUDGET:
            raise UsageError(
                f"budgets {budgets}", f"ascending integers from 1 to {MAX_BUDGET}", "e.g. --budgets 4,8,16,32"
            )
        for name, value, most in (("--seeds", self.seeds, MAX_SEEDS), ("--problems", self.problems, MAX_PROBLEMS)):
            if not 1 <= value <= most:
                raise UsageError(f"{name} is {value}", f"an integer from 1 to {most}", f"pass another {name}")


@dataclass(frozen=True)
class LiveRequest:
    """Arguments of :func:`run_live`.

    Attributes:
        settings: settings that decide the result.
        device: a GPU, or the recording of a rehearsal.
        gpus: CUDA indices of the GPUs that share the problems; not used by a rehearsal.
        out_path: the result file to write. The store and the journal lie beside it.
        command: the command line, for provenance.
        gpu_seconds: no problem begins after these seconds of the GPUs; None: no limit. It may differ when resuming.
        plan_only: say the plan and stop.
        resume: False starts anew and replaces an existing result. Measurements in the store are used in any case.
    """

    settings: LiveSettings
    device: Device
    gpus: tuple[int, ...]
    out_path: Path
    command: str
    gpu_seconds: float | None = None
    plan_only: bool = False
    resume: bool = True


def run_live(
    request: LiveRequest, progress: Progress | None = None, say: Callable[[str], None] = lambda line: None
) -> int:
    """Compare agents live and write the result file, or as many problems of it as the GPU seconds allow.

    Every kernel of a problem is measured once, and the store ``<out_path>.sqlite`` keeps it for all agents. After the
    searches of a problem, all choices are timed together in new rounds. A killed run resumes: finished problems are in
    the journal ``<out_path>.jsonl``, and measurements of the others are in the store.

    Args:
        request: the comparison.
        progress: called after each step of any problem.
        say: called with lines on the plan, on a resumed run and on its end.

    Returns:
        The number of problems that are left for a later command; 0 if the comparison is whole.

    Raises:
        UsageError: a setting is wrong, or ``out_path`` or the journal holds a comparison of other settings.
        RecordError: a file cannot be read or written; measurements are kept.
        DeviceError: a GPU cannot be used.
        ToolchainMissing: an agent needs a package that is not installed.
        Interrupted: Ctrl-C.
    """
    check_parquet()
    if request.out_path.is_dir():
        raise UsageError(f"--out {request.out_path} is a folder", "a result file", "name a file in it")
    return _LiveRun(request, progress, say).run()


class _LiveRun:
    """A run: its problems, agents, files and counters."""

    def __init__(self, request: LiveRequest, progress: Progress | None, say: Callable[[str], None]) -> None:
        self.request, self.say, self._progress = request, say, progress
        settings, name = request.settings, request.device.recording
        self.same, self.native = live_arms(settings.agents, settings.space, settings.native)
        self.recording = None if name is None else Recording.load(name)
        if self.recording is None:
            require_gpus(request.gpus)
        self.gpu: Gpu = gpu_of_device(request.gpus[0]) if self.recording is None else self.recording.gpu
        self.problems = self._problems()
        self.budget = RunBudget(request.gpu_seconds)
        self._steps, self._lock = 0, threading.Lock()

    def run(self) -> int:
        """Work through the problems and write the result; return the number of problems left."""
        request, path = self.request, self.request.out_path
        about = self._about()
        journal_path = path.with_name(path.name + ".jsonl")
        if request.resume and path.exists() and not journal_path.exists():
            check_same_settings(
                f"--out {path} is a comparison with other settings", read_live(path).meta.get("settings", {}), about,
                "choose another --out, or pass --no-resume to replace it",
            )  # fmt: skip
            self.say(f"{path} is finished")
            return 0
        searches = self._searches()
        if request.plan_only:
            self._say_plan(searches)
            return len(self.problems)
        journal, whole = Journal(journal_path, about, request.resume), False
        try:
            for entry in journal.entries:
                self._count(entry)
            if journal.entries:
                self.say(f"resuming: {len(journal.entries)} of {len(self.problems)} problems are in {journal_path}")
            self._say_plan(searches)
            self._search_left(searches, journal)
            left = len(self.problems) - len(journal.entries)
            whole = self._write(journal.entries, about) and not left
        except KeyboardInterrupt as error:
            kept = f"{len(journal.entries)} of {len(self.problems)} problems recorded in {journal_path}"
            raise Interrupted(f"interrupted with {kept}; measurements are in {self._store_path}") from error
        finally:
            journal.close(done=whole)
        return left

    @property
    def _store_path(self) -> Path:
        return self.request.out_path.with_name(self.request.out_path.name + ".sqlite")

    def _problems(self) -> list[Problem]:
        s = self.request.settings
        if self.recording is not None:
            return rehearsed_problems(self.recording, s.problems, s.problem_seed)
        return unseen_problems(s.problems, s.problem_seed, self.gpu, s.layout, s.dtype)

    def _measured_by(self) -> dict[str, Any]:
        """Return what the measurements depend on: equal ones may be shared by runs."""
        rounds = {"search": live_bench.SEARCH_ROUNDS, "judge": live_bench.JUDGED_ROUNDS}
        source = None if self.recording is None else recording_sha(self.recording)
        return {"gpu": self.gpu.name, "recording": source, **built_by(), "rounds": rounds}

    def _about(self) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat, as JSON reads them back."""
        policies = {name: os.environ.get(name, "") for name in (POLICY_VARIABLE, KNOB_POLICY_VARIABLE)}
        chosen = asdict(self.request.settings)
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}
        return {**listed, **self._measured_by(), "policies": policies, "drawn": [p.key for p in self.problems]}

    def _searches(self) -> LiveSearches:
        """Return the searches of every problem. A plan needs no agent that has learned."""
        settings, made = self.request.settings, dict[str, list[Agent]]()
        arms = list(dict.fromkeys((*self.same, *self.native)))
        for name in dict.fromkeys(arm.agent for arm in arms):
            seeds = range(settings.seeds if make_agent(name, 0, self.gpu).draws else 1)
            made[name] = [self._agent(name, seed) for seed in seeds]
        runs: list[tuple[LiveArm, Agent]] = [(arm, agent) for arm in arms for agent in made[arm.agent]]
        return LiveSearches(runs, self._offered, settings.budgets)

    def _agent(self, name: str, seed: int) -> Agent:
        if self.request.plan_only:
            return make_agent(name, seed, self.gpu)
        return ready_agent(name, seed, self.gpu, self.say)

    def _offered(self, space: str, problem: Problem) -> Sequence[KernelConfig]:
        """Return the candidates of a space. A rehearsal offers the recorded ones without PDL in every space."""
        if self.recording is None:
            return space_candidates(space, problem, self.gpu)
        return [config for config in ReplayEvaluator(self.recording).candidates(problem) if not config.pdl]

    def _say_plan(self, searches: LiveSearches) -> None:
        for line in plan_lines(self.problems, searches, self.budget, self._offered):
            self.say(line)

    def _bench(self, gpu_index: int) -> AbstractContextManager[live_bench.LiveBench]:
        return (
            live_bench.open_bench(gpu_index) if self.recording is None else live_bench.rehearsal_bench(self.recording)
        )

    def _search_left(self, searches: LiveSearches, journal: Journal) -> None:
        """Search and judge the problems that the journal lacks, until the GPU seconds are spent."""
        done = {entry["problem"] for entry in journal.entries}
        todo = [p for p in self.problems if p.key not in done]
        gpus = self.request.gpus if self.recording is None else (0,)
        measured_by = self._measured_by()
        run_id = f"measured-{hashlib.sha256(json.dumps(measured_by).encode()).hexdigest()[:12]}"
        turn = threading.Lock()

        @contextmanager
        def station(index: int) -> Iterator[Callable[[Problem], dict[str, Any]]]:
            with self._bench(index) as bench:
                shared = SharedMeasurements(bench.search, store, turn, run_id)

                def entry_of(problem: Problem) -> dict[str, Any]:
                    if not self.budget.has_room():
                        return {}
                    entry = compare_problem(problem, searches, bench, shared, self._step_done)
                    self.budget.add(entry["gpu_s"])  # here, before this GPU takes another problem
                    return entry

                yield entry_of

        with Store(self._store_path) as store:
            store.begin(run_id, measured_by)
            for entry in entries_of_gpus(todo, gpus, station):
                if entry:
                    journal.append(entry)

    def _count(self, entry: Mapping[str, Any]) -> None:
        """Count a problem that an earlier command finished."""
        self.budget.add(entry["gpu_s"])
        self._steps += self._steps_of_problem

    @property
    def _steps_of_problem(self) -> int:
        return self.request.settings.budgets[-1] + 1

    def _step_done(self) -> None:
        with self._lock:
            self._steps += 1
            if self._progress is not None:
                words = f"{self.budget.problems} problems done, {self.budget.spent:.0f} GPU s"
                self._progress(self._steps, len(self.problems) * self._steps_of_problem, words)

    def _write(self, entries: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bool:
        """Write the result file of the finished problems; return False, without a file, if none has figures."""
        of_problem = {entry["problem"]: entry for entry in entries}
        ordered = [of_problem[p.key] for p in self.problems if p.key in of_problem]
        rows = [row for entry in ordered for row in rows_of_entry(entry)]
        if not rows:
            self.say("no problem has figures: no result file is written")
            return False
        meta = {**self._origin(ordered), **_figures_of_run(ordered), **self._tables(), "settings": about}
        write_live(rows, meta, self.request.out_path)
        return True

    def _tables(self) -> dict[str, Any]:
        s = self.request.settings
        return {
            "gpu": self.gpu.name, "device": str(self.request.device), "rehearsal": self.recording is not None,
            "same": [str(arm) for arm in self.same], "native": [str(arm) for arm in self.native], "space": s.space,
            "budgets": list(s.budgets), "seeds": s.seeds, "problem_seed": s.problem_seed, "problems": s.problems,
        }  # fmt: skip

    def _origin(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the provenance, with the commits of all commands that measured."""
        commits = "; ".join(dict.fromkeys(str(entry["commit"]) for entry in entries))
        name, command = self.request.device.recording, self.request.command
        if self.recording is None or name is None:
            return {"provenance": {**collect_provenance(command, self.request.gpus[0]), "commit": commits}}
        recorded = about_recording(name, self.recording)
        return {"provenance": {**recorded["provenance"], "command": command, "commit": commits}, "recording": recorded}


def _figures_of_run(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return costs of the arms, totals of the measurements, and the problems without figures."""
    asked: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for entry in entries:
        last = max(pick[2] for pick in entry["picks"])
        for arm, _, budget, measurements, _ in entry["picks"]:
            asked[arm] = asked.get(arm, 0) + (measurements if budget == last else 0)
        for arm, cpu_s in entry["cpu_s"].items():
            seconds[arm] = seconds.get(arm, 0.0) + cpu_s
    return {
        "costs": {arm: round(1000 * seconds[arm] / max(1, count), 4) for arm, count in asked.items()},
        "totals": {
            "gpu_s": round(sum(entry["gpu_s"] for entry in entries), 3),
            "kernels": sum(entry["kernels"] for entry in entries),
            "measurements": sum(asked.values()),
        },
        "left_out": {entry["problem"]: why for entry in entries if (why := why_left_out(entry))},
    }
