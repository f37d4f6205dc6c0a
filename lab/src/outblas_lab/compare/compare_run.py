"""A comparison on disk: from its settings, through a journal, to its result file; the score of an agent file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outblas.core.errors import RecordError, UsageError, unknown_name
from outblas.core.journal import Journal, check_same_settings
from outblas.core.roofline import Gpu
from outblas.core.version import __version__
from outblas.records.provenance import collect_provenance, provenance_field, source_commit
from outblas.records.results import PROVENANCE_FIELDS
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import Interrupted
from outblas_lab.agents.agent_file import SUFFIX, check_agent_file, is_agent_file
from outblas_lab.agents.agent_table import PREPARATION_S
from outblas_lab.compare.compare_result import Comparison, read_comparison, write_comparison
from outblas_lab.compare.held_out import CompareUnit, HeldOutTask, Plan, Watch, check_agents, held_out_tasks, run_units
from outblas_lab.compare.measured_cost import UNITS
from outblas_lab.compare.splits import (
    PUBLIC_SEED,
    PUBLIC_SHARE,
    PUBLIC_SPLIT,
    SOURCES,
    arm_parts,
    arms_of,
    check_split,
    parts_of,
)
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.replay import standard_error

#: What a result file has room for, and more runs of an agent than any interval needs.
MAX_BUDGET, MAX_SEEDS = 1_000_000, 1000
#: Called as (tasks done, all tasks, name of the last finished task).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CompareRequest:
    """Arguments of :func:`run_compare`.

    Attributes:
        splits: names of the splits, each once: ``shapes``, ``families`` or ``layout``.
        agents: names of the agents, or paths of agent files, each once; not ``recorded`` or ``transfer``.
        sources: what agents learn from if the plan names another GPU's recording: keys of
            :data:`outblas_lab.compare.splits.SOURCES`.
        seeds: every agent runs with the seeds 0 .. ``seeds`` - 1; one that neither draws nor learns, with 0 only. 1 to
            1000.
        resume: False starts anew and replaces an existing result.
    """

    plan: Plan
    splits: Sequence[str]
    agents: Sequence[str]
    seeds: int
    out_path: Path
    command: str
    jobs: int = 1
    resume: bool = True
    sources: Sequence[str] = tuple(SOURCES)


def run_compare(
    request: CompareRequest, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Compare agents on the held-out problems of every split; write the result file and return its path.

    If the plan names another GPU's recording, each agent that learns is compared once for each source. The judged
    problems are always held-out ones of the plan's first recording.

    A killed run resumes from the journal ``<out_path>.jsonl``. Agents, splits, seeds and sample may then differ:
    missing tasks are run, and recorded tasks outside the request are left out. A journal with such tasks stays. With
    ``resume``, a finished result is replaced only by one of the same settings.

    Args:
        progress: called with (tasks done, all tasks, ``"SPLIT AGENT"``) about once a second of each process.
        say: called with one line on the kept part of a resumed run, on an agent's preparation, and on each 30 s of
            silence. A journal that stays gets a line, too.

    Raises:
        UsageError: names are unknown or repeated, budgets do not ascend, a number is below 1, or the recording is
            unknown or cannot be split so. Also if ``out_path`` or the journal holds other settings or another kind of
            file, or an agent breaks its contract.
        RecordError: the recording or the journal cannot be read, or the disk refuses.
        DeviceError: a process died.
        ToolchainMissing: an agent needs a package that is not installed.
        Interrupted: Ctrl-C.
    """
    plan, out_path = request.plan, request.out_path
    _check(request)
    if out_path.is_dir():
        raise UsageError(f"--out {out_path} is a directory", "a file path", "pass a file in that directory")
    recording = Recording.load(plan.recording)
    other = None if plan.across is None else Recording.load(plan.across)
    if other is not None and other.gpu == recording.gpu:
        wrong = f"--across {plan.across} has the same GPU as --device ({other.gpu.name})"
        raise UsageError(wrong, "a recording of another GPU", "pass another --across")
    arms = list(request.agents) if other is None else arms_of(request.agents, request.sources, recording.gpu)
    if request.resume and out_path.exists():
        _check_replaced(request, arms, recording, other)
    made = {name: held_out_tasks(plan, recording, name) for name in request.splits}
    sources = [""] if other is None else ["", *SOURCES]  # an agent by itself has source ""
    learned = {
        name: {source: sum(len(p.problems) for p in parts_of(source, split, recording, other)) for source in sources}
        for name, (split, _) in made.items()
    }
    units = [
        CompareUnit(split, agent, seed)
        for split in request.splits
        for agent in arms
        for seed in range(request.seeds if _differs(agent, recording.gpu) else 1)
    ]
    keys = {split: [task.key for task in tasks] for split, (_, tasks) in made.items()}
    total = sum(len(keys[unit.split]) for unit in units)
    settings: dict[str, Any] = {} if other is None else {"across": recording_sha(other)}
    settings |= {
        "recording": recording.provenance,
        "sha256": recording_sha(recording),
        "problems": [p.key for p in recording.problems],
        "budgets": list(plan.budgets),
        "held_out": plan.share,
        "split_seed": plan.split_seed,
    }
    if plan.unit != "measurements":
        settings["unit"] = plan.unit
    # of each agent file the SHA-256, so that an edited file does not resume
    if files := {name: check_agent_file(Path(name)) for name in request.agents if is_agent_file(name)}:
        settings["agent_files"] = files
    journal = Journal(out_path.with_name(out_path.name + ".jsonl"), settings, request.resume)
    answers = _Answers(units, keys)
    written = False
    try:
        for entry in journal.entries:
            answers.add(entry)
        here, missing = source_commit(), answers.missing()
        if answers.count and say is not None:
            say(f"resuming: {answers.count} of {total} tasks are already in {journal.path}")
        for entry in run_units(missing, plan, request.jobs, _watch(say, learned)):
            journal.append({**entry, "commit": here})
            answers.add(entry)
            if progress is not None:
                progress(answers.count, total, f"{entry['split']} {entry['agent']}")
        rows = [row for unit in units for row in answers.rows(unit, plan.budgets)]
        sizes = {name: (len(split.training), len(split.held_out), tasks) for name, (split, tasks) in made.items()}
        meta = _meta(plan, recording, request.command, journal.entries, sizes)
        if other is not None:
            assert plan.across is not None
            meta["across"] = {**about_recording(plan.across, other), "gpu": other.gpu.name, "learned": learned}
        write_comparison(rows, {**meta, "agents": arms, "seeds": request.seeds}, out_path)
        written = True
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted with {answers.count} of {total} tasks recorded in {journal.path}") from error
    finally:
        journal.close(done=written and not answers.outside)
    if answers.outside and say is not None:
        say(
            f"kept {journal.path}: it has {answers.outside} tasks outside this comparison. To continue "
            f"them, move {out_path} away and rerun their command"
        )
    return out_path


def _watch(say: Callable[[str], None] | None, training: Mapping[str, Mapping[str, int]]) -> Watch | None:
    """Return the watcher that announces each agent's preparation and long silences.

    Args:
        training: split -> source -> number of training problems.
    """
    if say is None:
        return None

    def begun(unit: CompareUnit) -> None:
        agent, source = arm_parts(unit.agent)
        if agent in PREPARATION_S:
            work = f"training on {training[unit.split][source]} problems"
            about = f"about {PREPARATION_S[agent]} s on one core of a server"
            say(f"agent {unit.agent}, split {unit.split}: {work} ({about})")

    def waiting(units: Sequence[CompareUnit], seconds: float) -> None:
        names = ", ".join(sorted({f"{unit.agent} ({unit.split})" for unit in units}))
        say(f"still running after {seconds:.0f} s: {names}")

    return Watch(begun, waiting)


class _Answers:
    """The journal's entries of the requested units.

    Attributes:
        outside: recorded tasks that were not requested.
    """

    def __init__(self, units: Sequence[CompareUnit], keys: Mapping[str, list[tuple[str, str]]]) -> None:
        self._keys = keys
        self._wanted = {split: set(found) for split, found in keys.items()}
        self._found: dict[CompareUnit, dict[tuple[str, str], tuple[list[float], list[bool]]]] = {u: {} for u in units}
        self.outside = 0

    @property
    def count(self) -> int:
        return sum(map(len, self._found.values()))

    def add(self, entry: Mapping[str, Any]) -> None:
        found = self._found.get(CompareUnit(entry["split"], entry["agent"], entry["seed"]))
        for problem, launch, qualities, passed in entry["tasks"]:
            if found is not None and (problem, launch) in self._wanted[entry["split"]]:
                found[problem, launch] = qualities, passed
            else:
                self.outside += 1

    def missing(self) -> list[CompareUnit]:
        """Units with tasks left, and which of them are done."""
        return [
            CompareUnit(unit.split, unit.agent, unit.seed, frozenset(found))
            for unit, found in self._found.items()
            if len(found) < len(self._keys[unit.split])
        ]

    def rows(self, unit: CompareUnit, budgets: Sequence[int]) -> Iterable[tuple[Any, ...]]:
        """Rows of the result file, in the order of the tasks."""
        for problem, launch in self._keys[unit.split]:
            for values in zip(budgets, *self._found[unit][problem, launch], strict=True):
                yield (unit.split, unit.agent, unit.seed, problem, launch, *values)


def _differs(name: str, gpu: Gpu) -> bool:
    """Return whether runs of an agent with different seeds differ."""
    if is_agent_file(name):
        return True  # the file is run in a process of its own, never here
    agent = make_agent(arm_parts(name)[0], 0, gpu)
    return agent.draws or agent.learns


def _check(request: CompareRequest) -> None:
    plan, splits, seeds = request.plan, request.splits, request.seeds
    check_agents(request.agents)
    if plan.across is not None and any(map(is_agent_file, request.agents)):
        raise UsageError("an agent file was passed with --across", "registered agents only", "omit the agent file")
    for name in splits:
        check_split(name)
    if plan.unit not in UNITS:
        raise unknown_name("unit", plan.unit, UNITS, "pass one of them as --unit")
    if not splits or len(set(splits)) != len(splits):
        raise UsageError(f"--splits is {','.join(splits)!r}", "one or more distinct splits", "correct --splits")
    budgets = list(plan.budgets)
    if not budgets or budgets[0] < 0 or budgets != sorted(set(budgets)) or budgets[-1] > MAX_BUDGET:
        wrong = f"--budgets is {budgets}"
        raise UsageError(wrong, f"ascending integers from 0 to {MAX_BUDGET}", "pass e.g. --budgets 0,1,2,4,8")
    if seeds > MAX_SEEDS:
        raise UsageError(f"--seeds is {seeds}", f"an integer from 1 to {MAX_SEEDS}", "correct --seeds")
    sample = 1 if plan.sample is None else plan.sample
    for name, value in (("--seeds", seeds), ("--jobs", request.jobs), ("--sample", sample)):
        if value < 1:
            raise UsageError(f"{name} is {value}", "a positive integer", f"pass a larger {name}")


def _check_replaced(
    request: CompareRequest, arms: Sequence[str], recording: Recording, other: Recording | None
) -> None:
    """Raise unless ``out_path`` is a result of the same settings; the order of agents and splits is none of them."""
    path, plan = request.out_path, request.plan
    do = "pass another --out, or --no-resume to replace it"
    try:
        was = read_comparison(path)
    except RecordError as error:
        wrong = f"--out {path} exists, but no comparison can be read from it"
        raise UsageError(wrong, "a new file, or a result with the same settings", do) from error
    options = {"held_out": plan.share, "split_seed": plan.split_seed, "sample": plan.sample, "seeds": request.seeds}
    measured = {f"recording.{field}": provenance_field(recording.provenance, field) for field in PROVENANCE_FIELDS}
    check_same_settings(
        f"--out {path} is a comparison with other settings",
        {
            **{key: was.meta.get(key) for key in options},
            "unit": was.unit,
            **{f"recording.{field}": was.measured.get(field) for field in PROVENANCE_FIELDS},
            "across": (was.meta.get("across") or {}).get("sha256"),
            "agents": sorted(was.agents), "splits": sorted(was.splits), "budgets": list(was.budgets),
        },
        {
            **options, **measured,
            "unit": plan.unit,
            "across": None if other is None else recording_sha(other),
            "agents": sorted(arms), "splits": sorted(request.splits), "budgets": list(plan.budgets),
        },
        do,
    )  # fmt: skip


def _meta(
    plan: Plan,
    recording: Recording,
    command: str,
    entries: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, tuple[int, int, Sequence[HeldOutTask]]],
) -> dict[str, Any]:
    """Return provenance, the compared problems and the agents' CPU seconds, for the result file."""
    about = about_recording(plan.recording, recording)
    run = collect_provenance(command)
    commits = "; ".join(dict.fromkeys(str(entry["commit"]) for entry in entries))
    return {
        "suite": recording.suite,
        "device": f"replay:{plan.recording}",
        "recording": about,
        "provenance": {**about["provenance"], "date": run["date"], "commit": commits, "command": command},
        "held_out": plan.share,
        "split_seed": plan.split_seed,
        "sample": plan.sample,
        "unit": plan.unit,
        "splits": {
            name: {
                "training": training,
                "held_out": out,
                "searched": len({t.problem for t in tasks}),
                "tasks": len(tasks),
                "noise_floor": noise_floor(recording, tasks),
            }
            for name, (training, out, tasks) in sizes.items()
        },
        "costs": {agent: _cost(agent, entries) for agent in dict.fromkeys(entry["agent"] for entry in entries)},
    }


def about_recording(name: str, recording: Recording) -> dict[str, Any]:
    """Return name, provenance and SHA-256 of a recording, for the result file."""
    measured = {field: provenance_field(recording.provenance, field) for field in PROVENANCE_FIELDS}
    return {"name": name, "provenance": measured, "sha256": recording_sha(recording)}


def _cost(agent: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU seconds to prepare once and CPU milliseconds per task, the replay's share included, on average."""
    mine = [entry for entry in entries if entry["agent"] == agent]
    prepared = [entry["prepare_s"] for entry in mine if entry["prepare_s"] is not None]
    tasks = sum(len(entry["tasks"]) for entry in mine)
    return {
        "prepare_s": round(sum(prepared) / len(prepared), 4),
        "task_ms": round(1000 * sum(entry["seconds"] for entry in mine) / tasks, 4),
    }


#: Recordings that are drawn for the simulation.
DRAWS = 200


def noise_floor(recording: Recording, tasks: Sequence[HeldOutTask]) -> float:
    """Return the quality of the choice of the fastest recorded candidate, if recording and truth differ by the noise.

    It is a geometric mean over tasks, below 1. Recorded medians are taken as the truth. Other recordings are drawn
    around them: normal in log time, with the standard error that follows from a cell's spread and rounds. Each
    recording's fastest candidate is then judged by the truth. The recording hides differences of agents above this
    floor.

    Args:
        tasks: tasks of recorded problems, at least one.
    """
    rng, losses = np.random.default_rng(0), []
    for task in tasks:
        row = recording.row(task.problem)
        columns = [column for c in task.candidates if (column := recording.catalogue_index(c)) is not None]
        passed = [column for column in columns if np.isfinite(recording.median_us[row, column])]
        log_us = np.log(recording.median_us[row, passed].astype(np.float64))
        errors = [
            standard_error(float(recording.spread[row, column]), int(recording.rounds[row, column]))
            for column in passed
        ]
        drawn = log_us + rng.standard_normal((DRAWS, len(passed))) * np.array(errors)
        losses.append(float(np.mean(log_us[drawn.argmin(axis=1)] - log_us.min())))
    return round(math.exp(-float(np.mean(losses))), 6)


#: Numbers of measurements after which a score is noted.
SCORED_AFTER = (0, 1, 2, 4, 8)
#: Agents beside which a file is scored: without knowledge, with that of near shapes, and with a learned model.
BASELINES = ("random", "nearest", "regressor")


@dataclass(frozen=True)
class ScoreRequest:
    """Arguments of :func:`score_agent`.

    Attributes:
        sample: number of held-out problems to search, stratified by regime; None: all.
    """

    agent: Path
    recording: str
    command: str
    baselines: Sequence[str] = BASELINES
    split_seed: int = PUBLIC_SEED
    sample: int | None = None
    seeds: int = 3
    folder: Path = Path("runs/score")
    jobs: int = 1
    resume: bool = True


class Score(NamedTuple):
    """An agent file's comparison, that of the baselines on the same problems, and the SHA-256 of the file."""

    agent: Comparison
    baselines: Comparison | None
    agent_sha: str


def score_agent(
    request: ScoreRequest, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> Score:
    """Score an agent file on the held-out problems of a split, and then the baselines.

    The agent prepares itself on the other problems, and learns of a held-out one only by its own measurements. It runs
    in a process of its own. A score with the same file, settings and source code is read and not made again. So
    baselines run once for all files. A killed run resumes.

    Raises:
        UsageError: the file or its agent fails or breaks its contract, or a setting is out of range.
        RecordError: the recording or a result cannot be read, or the disk refuses.
        DeviceError: the agent ended its process.
        Interrupted: Ctrl-C.
    """
    if not is_agent_file(str(request.agent)):
        wrong = f"agent file {request.agent} does not end in {SUFFIX}"
        raise UsageError(wrong, f"a Python file ending in {SUFFIX}", "rename the file")
    agent_sha = check_agent_file(request.agent)
    if request.baselines:
        check_agents(request.baselines)
    measured = recording_sha(Recording.load(request.recording))
    scored = _compared(request, [str(request.agent)], f"{request.agent.stem}", [measured, agent_sha], progress, say)
    baselines = list(request.baselines)
    beside = _compared(request, baselines, "baselines", [measured], progress, say) if baselines else None
    return Score(scored, beside, agent_sha)


def _compared(
    request: ScoreRequest, agents: list[str], stem: str, hashes: list[str], progress: Progress | None,
    say: Callable[[str], None] | None,
) -> Comparison:  # fmt: skip
    """Return the comparison of some agents, from its file if it is there. The file's name has the settings' hash."""
    plan = Plan(request.recording, SCORED_AFTER, PUBLIC_SHARE, request.split_seed, request.sample)
    about = [agents, hashes, plan.budgets, plan.share, plan.split_seed, plan.sample, request.seeds]
    text = json.dumps([*about, __version__, source_commit()])
    path = request.folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.parquet"
    if not (request.resume and path.exists()):
        run_compare(
            CompareRequest(
                plan, (PUBLIC_SPLIT,), agents, request.seeds, path, request.command, request.jobs, request.resume
            ),
            progress,
            say,
        )
    elif say is not None:
        say(f"{', '.join(agents)}: reused from {path}")
    return read_comparison(path)
