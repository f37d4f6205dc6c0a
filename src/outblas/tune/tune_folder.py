"""The directory of a tune run: its name, its files, and what a finished or killed run has left in them."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.config import Candidate, KernelConfig, KernelKind, Launch, config_name
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.files import json_text
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.core.weight import WeightRange
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.result_rows import launch_columns
from outblas.records.results import COLUMNS, Row
from outblas.records.run_directory import RunDirectory
from outblas.records.store import Store
from outblas.records.user_library import stamp_differences

FORMAT = 1


@dataclass(frozen=True)
class RunFiles(RunDirectory):
    """Paths inside the directory of a tune run, as properties of ``RunFiles(path)``. No file is made or read.

    ``library`` is ``library.json``, ``result`` is ``result.parquet`` and ``times`` is ``times.json`` in it. Those of
    :class:`RunDirectory` are ``run`` (``run.json``), ``store`` (``store.sqlite``) and ``report`` (``report.html``).
    """

    @property
    def library(self) -> Path:
        return self.path / "library.json"

    @property
    def result(self) -> Path:
        return self.path / "result.parquet"

    @property
    def times(self) -> Path:
        return self.path / "times.json"


def folder_name(
    suite: str,
    problems: Sequence[Problem],
    agent: str,
    seed: int,
    budget: str,
    place: str,
    sample: int | None = None,
    ranges: Sequence[WeightRange] = (),
) -> str:
    """Return the name of a run's directory, which states its settings.

    Example: ``grid1000-sample40-tn-fp16-fp32-ppo-8-replay-h200``. A seed other than 0 adds ``seed<N>`` after the agent.
    Suite ``custom`` adds the ``M_N_K`` of a single problem, e.g. ``custom-64_4096_64-tn-fp16-fp32-ppo-8-cuda-0``. For
    several, it adds 8 hex digits of a hash instead. ``captured`` has a hash and no layout, dtype and accumulator.
    Ranges add ``m`` and their M, e.g. ``linear-4096_4096-m1-8192-tn-fp16-fp32-heuristic-16-cuda-0``, or ``m`` and a
    hash.

    Args:
        problems: one or more, or none beside ranges; all of one layout, dtype and accumulator unless ``captured``.
        budget: the budget as the user wrote it; a comma becomes ``-``.
        place: the evaluator, e.g. ``replay:h200``; ``:`` and ``/`` become ``-``.
        sample: number of problems drawn from the suite, or None; unused for ``custom`` and ``captured``.
        ranges: weights that are tuned for a range of M; of a model all, also those of which nothing lacks.
    """
    if suite == "captured":
        kind: tuple[str, ...] = (*((_hash(problems),) if problems else ()), *_range_words(ranges))
    else:
        one = problems[0] if problems else ranges[0].problem(ranges[0].first)
        kind = (one.layout.lower(), one.dtype.lower(), one.acc.lower())
        if suite == "custom":
            kind = (one.mnk if len(problems) == 1 else _hash(problems), *kind)
        elif sample is not None:
            kind = (f"sample{sample}", *kind)
        elif suite == "linear" and len(ranges) == 1:
            kind = (f"{one.n}_{one.k}", f"m{ranges[0].first}-{ranges[0].last}", *kind)
        else:
            kind = (*_range_words(ranges), *kind)
    seeded = () if seed == 0 else (f"seed{seed}",)
    return "-".join((suite, *kind, agent, *seeded, budget.replace(",", "-"), place.replace(":", "-").replace("/", "-")))


def other_conditions(about: Mapping[str, Any], stamp: Mapping[str, Any]) -> list[str]:
    """Return how the conditions of a run differ from the present ones, a text each; an empty list if they agree.

    They are what an installed library is stamped with: GPU, driver, NVRTC, release and kernels.

    Args:
        about: content of ``run.json``.
        stamp: the present conditions, as of :func:`outblas.records.user_library.stamp_of`.

    Raises:
        RecordError: the table of equal kernels is damaged.
    """
    there = about.get("stamp")
    return stamp_differences(there if isinstance(there, dict) else {}, stamp)


def folder_beside(path: Path, stamp: Mapping[str, Any]) -> Path:
    """Return the folder for a run of other conditions than those in ``path``, e.g. ``runs/a-1b2c3d4e``.

    Args:
        stamp: the present conditions, which give the name its end.
    """
    return path.with_name(f"{path.name}-{hashlib.sha256(json_text(dict(stamp))).hexdigest()[:8]}")


def run_name(store: Store, path: Path) -> str:
    """Return the name of a folder's run in its store: the folder's, or that of the only run if it was renamed.

    Args:
        path: the folder. Its name is that of a new run.
    """
    runs, name = [run.run_id for run in store.runs()], path.resolve().name
    return runs[0] if name not in runs and len(runs) == 1 else name


@contextmanager
def open_store(path: Path) -> Iterator[tuple[Store, str]]:
    """Open the store of a run directory; it is closed at the end of the context.

    Yields:
        (store, name of the run in it). The name is the directory's, or that of the only run if the directory was
        renamed.

    Raises:
        RecordError: there is no store, it cannot be read, or it has several runs of other names.
    """
    file = RunFiles(path).store
    if not file.is_file():
        raise RecordError(f"{path} has no {file.name}", "an `outblas tune` run directory", "pass another path")
    with Store(file) as store:
        runs, name = [run.run_id for run in store.runs()], run_name(store, path)
        if name not in runs:
            do = "give the directory the name of one of these runs"
            raise RecordError(f"{file} has {len(runs)} runs, none named {name!r}", "a run with that name", do)
        yield store, name


def provenance_of(path: Path) -> dict[str, Any]:
    """Return the provenance of a finished run's figures, from its ``run.json``.

    Its keys are ``gpu``, ``driver``, ``toolchain``, ``date``, ``commit`` and ``command``.

    Raises:
        RecordError: ``run.json`` is missing, cannot be read or is of another format, or the run is not finished.
    """
    found = read_run(RunFiles(path).run).get("provenance")
    if not isinstance(found, dict):
        raise RecordError(f"the run in {path} is not finished", "a finished run", "rerun its command; it resumes")
    return dict(found)


def measured_on(path: Path) -> list[str] | None:
    """Return the names of the GPUs that measured a finished run, e.g. ``["NVIDIA H200"]``; None if they are not known.

    They are not known if ``run.json`` is missing, or the run is not finished.

    Raises:
        RecordError: ``run.json`` cannot be read or is of another format.
    """
    files = RunFiles(path)
    origin = read_run(files.run).get("provenance") if files.run.exists() else None
    name = origin.get("gpu") if isinstance(origin, dict) else None
    return name.split("; ") if isinstance(name, str) and name != "unknown" else None


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of a ``run.json``.

    Raises:
        RecordError: the file cannot be read, or is of another format.
    """
    do = "pass another --run, or restore the file"
    return read_object(path, f"a run of format {FORMAT}", do, format=FORMAT)


def _hash(asked: Sequence[Problem | WeightRange]) -> str:
    return hashlib.sha256("".join(one.key for one in asked).encode()).hexdigest()[:8]


def _range_words(ranges: Sequence[WeightRange]) -> tuple[str, ...]:
    """Return the part of a folder's name that stands for ranges; empty without any."""
    return (f"m{_hash(ranges)}",) if ranges else ()


def result_rows(library: Library, store: Store, run_id: str, evaluator: Evaluator) -> Iterator[Row]:
    """Yield the result rows of a tuned library: one for each problem and launch option, in the library's order.

    The options are ``plain`` and ``pdl``, and ``weights`` if any problem has a kernel for it. A problem without a
    winner has a row with ``fallback`` True. The times come from the evaluations that chose the library, so a row
    carries the bias of selection. ``outblas bench`` times the winners again on fresh inputs.

    Args:
        evaluator: evaluator of the run, for baselines that the store lacks.

    Raises:
        RecordError: a problem has no baseline, or the store lacks an evaluation that was installed.
    """
    for row in library.rows:
        known = store.recorded(run_id, row.problem)
        recorded = next((e.baselines_us for e in known.values() if e.baselines_us), None)
        baselines = evaluator.baselines(row.problem) if recorded is None else recorded
        for launch in library.launches:
            choice = row.choice(launch)
            yield (
                _fallback_row(row, launch, known.values(), baselines, evaluator)
                if choice is None
                else _winner_row(row, launch, choice, known.get(choice.config), evaluator)
            )


def _winner_row(
    row: LibraryRow, launch: Launch, choice: LibraryChoice, e: Evaluation | None, evaluator: Evaluator
) -> Row:
    if e is None or e.timing is None or e.speedup is None:
        raise RecordError(f"the winner of {row.problem.key} has no evaluation", "a stored evaluation", "tune again")
    name = e.speedup.baseline
    return {
        **_common(row, launch, name, e.baselines_us, evaluator),
        "config": config_name(e.config),
        "status": e.status.value,
        "fallback": False,
        "ours_us": e.timing.median_us,
        "ours_spread": e.timing.spread,
        "speedup": choice.speedup,
        "low": choice.low,
        "high": choice.high,
        "published": choice.speedup,
        "rounds": len(e.timing.samples_us) or None,
        "repeats": e.timing.repeats if e.timing.samples_us else None,
        "operand_sets": e.timing.operand_sets if e.timing.samples_us else None,
        "sm_clock_mhz": e.counters.get("sm_clock_mhz"),
        "temperature_c": e.counters.get("temperature_c"),
    }


def _fallback_row(
    row: LibraryRow, launch: Launch, tried: Iterable[Evaluation], baselines: Mapping[str, float], evaluator: Evaluator
) -> Row:
    """``status`` is the furthest that any candidate came: ``passed`` when ours was right but not surely faster."""
    order = list(Status)
    reached = max((e.status for e in tried), key=order.index, default=Status.LEFT_OUT)
    return {
        **_common(row, launch, row.baseline, baselines, evaluator),
        "config": "",
        "status": reached.value,
        "fallback": True,
        "published": 1.0,
    }


def _common(row: LibraryRow, launch: Launch, name: str, baselines: Mapping[str, float], evaluator: Evaluator) -> Row:
    problem = row.problem
    if name not in baselines:
        raise RecordError(f"no baseline was timed for {problem.key}", "at least one", "time the baselines in the run")
    return {
        **problem.to_json(),
        "mode": "offline",
        **launch_columns(launch),
        "baseline": name,
        "baseline_us": baselines[name],
        "baseline_detail": evaluator.baseline_detail(problem, name) or None,
        "lt_auto_detail": row.algorithm or None,
        "floor_us": floor_us(problem, evaluator.gpu),
        "regime": regime(problem, evaluator.gpu),
        **{f"{one}_us": us for one, us in baselines.items() if f"{one}_us" in COLUMNS},
    }


class KeptBaselines(Evaluator):
    """An evaluator whose words on baselines outlive its process.

    The store keeps the times of baselines with each evaluation, and not their algorithms. An evaluator that has not
    timed a problem in this session would time its baselines for a question on them, which takes 0.4 s.
    """

    def __init__(self, evaluator: Evaluator, store: Store, run_id: str) -> None:
        self._evaluator, self._store, self._run_id = evaluator, store, run_id
        self._kept: dict[Problem, dict[str, str]] = {}

    @property
    def gpu(self) -> Gpu:
        return self._evaluator.gpu

    @property
    def source(self) -> str:
        return self._evaluator.source

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        return self._evaluator.candidates(problem)

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        return self._evaluator.candidates_of(problems)

    def expect(self, problems: Iterable[Problem]) -> None:
        self._evaluator.expect(problems)

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        self._evaluator.trust(kinds)

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Generator[Evaluation, None, None]:
        """Yield the evaluations. When all are done, keep the algorithms of the baselines that were timed with them.

        An evaluator may know them only then. Those of a batch that was given up are asked for, and kept, later.

        Raises:
            RecordError: the store cannot be written; and what the evaluator raises.
        """
        timed: dict[Problem, Iterable[str]] = {}
        with closing_evaluations(self._evaluator.evaluate(pairs)) as evaluations:
            for evaluation in evaluations:
                if evaluation.baselines_us:
                    timed[evaluation.problem] = evaluation.baselines_us
                yield evaluation
        for problem, names in timed.items():
            self._keep(problem, {name: self._evaluator.baseline_detail(problem, name) for name in names})

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return self._evaluator.baselines(problem)

    def baseline_detail(self, problem: Problem, name: str) -> str:
        kept = self._details(problem)
        if name not in kept:
            kept = {**kept, name: self._evaluator.baseline_detail(problem, name)}
            self._keep(problem, kept)
        return kept[name]

    def _keep(self, problem: Problem, details: dict[str, str]) -> None:
        if details != self._details(problem):
            self._store.add_outcome(self._run_id, _piece(problem), details)
            self._kept[problem] = details

    def _details(self, problem: Problem) -> dict[str, str]:
        if problem not in self._kept:
            self._kept[problem] = dict(self._store.outcome(self._run_id, _piece(problem)) or {})
        return self._kept[problem]


def _piece(problem: Problem) -> str:
    return f"baselines of {problem.key}"
