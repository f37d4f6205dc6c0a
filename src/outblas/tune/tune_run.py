"""A tune run on disk: its directory, from the settings to the library and the result file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.config import Launch
from outblas.core.errors import UsageError
from outblas.core.evaluator import Evaluator
from outblas.core.files import json_text, lock_run_folder, write_json
from outblas.core.journal import check_same_settings
from outblas.core.lab_parts import part
from outblas.core.problem import Problem
from outblas.core.suites import SUITES
from outblas.core.suites import suite as problems_of
from outblas.core.version import __version__
from outblas.records.library import Library
from outblas.records.parquet import check_parquet
from outblas.records.proved_kernels import proved_kinds
from outblas.records.provenance import provenance_field, utc_now
from outblas.records.results import PROVENANCE_FIELDS, write_result
from outblas.records.store import Store
from outblas.records.user_library import stamp_of
from outblas.runtime.device import Device
from outblas.tune.agents.agent_registry import agents, make_agent
from outblas.tune.agents.base import Agent
from outblas.tune.intervals.interval_search import SearchWatch, Told
from outblas.tune.intervals.range_search import RangesRequest, joined_free, offered_ms, search_ranges
from outblas.tune.recorded_device import RecordedDevice
from outblas.tune.tune import PROBLEMS_AT_ONCE, Progress, SearchOptions, tune
from outblas.tune.tune_folder import FORMAT as FORMAT
from outblas.tune.tune_folder import KeptBaselines, folder_beside, other_conditions, read_run, result_rows, run_name
from outblas.tune.tune_folder import RunFiles as RunFiles
from outblas.tune.tune_folder import folder_name as folder_name
from outblas.tune.tune_folder import measured_on as measured_on
from outblas.tune.tune_folder import open_store as open_store
from outblas.tune.tune_folder import provenance_of as provenance_of

if TYPE_CHECKING:
    from outblas.tune.judged_workers import Workers

#: Called with the folder of a run and the number of measurements that it has.
Begun = Callable[[Path, int], None]

#: Problems searched side by side where the first of them matter most.
RANKED_AT_ONCE = 8


@dataclass(frozen=True)
class TuneSettings:
    """Settings that identify a tune run.

    Attributes:
        problems: keys of the problems. For a whole suite, instead its kinds, e.g. ``("TN_fp16_fp32",)``.
        budget: measurements per problem at most.
        device: the device as the command line names it, e.g. ``cuda:0`` or ``replay:h200``; or the workers in words.
        gpu: short name of the GPU, e.g. ``h200``.
        ranges: keys of the weights that are tuned for a range of M. Runs of earlier releases have none.
    """

    suite: str
    problems: tuple[str, ...]
    agent: str
    budget: int
    seed: int
    device: str
    gpu: str
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True)
class TuneRequest:
    """Arguments of :func:`run_tune`.

    Attributes:
        problems: the problems to tune by themselves, each once.
        suite: name of their suite, or ``custom``, ``captured``, ``linear`` or ``model``.
        budget: measurements per problem at most.
        workers: several workers in place of the one of ``device``; a resumed run may have another number of them.
        budgets: measurements of single problems; ``problems`` are then ranked, the most important first.
        seconds: time limit of the search; the library then has the problems tried so far. A resumed run starts it anew.
        ranges: weights to tune for a range of M. They are tuned before ``problems``.
        launch: as :attr:`outblas.tune.tune.SearchOptions.launch`, for ``problems``.
        beside: if ``path`` has measurements of another driver, NVRTC or release, use a folder beside it.
    """

    problems: Sequence[Problem]
    suite: str
    agent: str
    budget: int
    seed: int
    device: Device
    path: Path
    command: str
    workers: Workers | None = None
    budgets: Mapping[Problem, int] | None = None
    seconds: float | None = None
    ranges: RangesRequest = RangesRequest()
    launch: Launch = "weights"
    beside: bool = False

    @property
    def has_gate(self) -> bool:
        return self.workers is not None and self.workers.judging.epilogue.on

    @property
    def place(self) -> str:
        return str(self.workers or self.device)


@dataclass(frozen=True)
class TuneOutcome:
    """The outcome of :func:`run_tune`.

    Attributes:
        files: paths of the run's files: ``library``, ``result``, ``run`` and ``store`` are written.
        decided: the library with a row for each sampled M of its intervals, too. The result file has these rows.
        asked: number of problems that were to be decided, sampled M included.
        weights: number of weights that are tuned for a range of M.
        open_weights: number of weights whose intervals are not complete, because the time was up.
        kept: number of measurements that an earlier session had left in the folder.
        measured: number of measurements of this session.
    """

    library: Library
    files: RunFiles
    decided: Library
    asked: int
    weights: int = 0
    open_weights: int = 0
    kept: int = 0
    measured: int = 0


def default_agent(device: Device) -> str:
    """Return the name of the agent for a device: ``heuristic``, but ``regressor`` on a recording if it is there."""
    return "regressor" if device.recording is not None and "regressor" in agents() else "heuristic"


def run_tune(
    request: TuneRequest,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    told: Told | None = None,
    begun: Begun | None = None,
) -> TuneOutcome:
    """Tune into the directory of the request, or resume the run of the same settings there.

    Args:
        progress: called after every measurement, as by :func:`outblas.tune.tune.tune`.
        clock: time in seconds; only differences count.
        told: called after every measurement of the search for intervals, with the number done, an estimate of all, and
            words on the present work.
        begun: called before the first measurement with the run's folder and the number of measurements that it has.

    Returns:
        The library, the paths of its files and its decisions. The report is left to the caller. ``times.json`` has the
        seconds of each process that works on a GPU, by phase.

    Raises:
        UsageError: the agent or recording is unknown, a problem was not recorded, or the directory holds another run,
            or one of another driver, NVRTC or release.
            Also agent ``recorded`` or ``transfer`` on a recording, or a reason of :func:`outblas.tune.tune.tune`.
        RecordError: the directory cannot be written, or another process works in it; earlier records are intact.
        DeviceError: the live GPU cannot be used.
        ToolchainMissing: pyarrow, or a package for the live GPU, is not installed.
    """
    check_parquet()
    device = request.device
    if device.recording is not None and request.agent in ("recorded", "transfer"):
        raise UsageError(
            f"agent {request.agent} would already know the answers in a recording",
            "a live GPU for this agent",
            "pass another --agent, or --device cuda:0",
        )
    recording = None if device.recording is None else _recorded(device).load(device.recording)
    if recording is not None:
        for problem in request.problems:
            recording.row(problem)
        for one in request.ranges.ranges:
            offered_ms(one, recording)
    with open_evaluator(device, recording, request.workers) as evaluator:
        agent = make_agent(request.agent, request.seed, evaluator.gpu)
        origin = _origin(evaluator, device, recording, request.command)
        is_live = recording is None and evaluator.source.startswith("cuda")
        stamp = stamp_of(origin["provenance"]) if is_live else None
        if is_live and not request.has_gate:  # those are other kernels, which nothing has proved
            evaluator.trust(proved_kinds(Library.packaged(evaluator.gpu.name, missing_ok=True)))
        files = _files(request, stamp)
        with lock_run_folder(files.path), _kept_times(evaluator, files.times):
            about = _open(files, _settings(request, evaluator), request.command, stamp)
            ranges, about = joined_free(request.ranges, files.run, about)
            request = replace(request, ranges=ranges)
            with Store(files.store) as store:
                options = _search_options(request, clock)
                session = _Session(evaluator, recording, agent, files, store, about, origin)
                return _search(request, session, options, progress, told or _ignore, begun or _ignore)


@dataclass(frozen=True)
class _Session:
    """The open parts of a run; ``about`` is the content of run.json, ``origin`` the provenance of new measurements."""

    evaluator: Evaluator
    recording: RecordedDevice | None
    agent: Agent
    files: RunFiles
    store: Store
    about: dict[str, Any]
    origin: dict[str, Any]


def _search(
    request: TuneRequest, session: _Session, options: SearchOptions, progress: Progress | None, told: Told, begun: Begun
) -> TuneOutcome:
    store, files, evaluator = session.store, session.files, session.evaluator
    agent, name = session.agent, run_name(store, files.path)
    store.begin(name, {"agent": agent.name, "seed": agent.seed, "source": evaluator.source})
    kept = len(store.recorded_pairs(name))
    begun(files.path, kept)
    if (known := _finished(request, files, session.about)) is not None:
        return TuneOutcome(known, files, known, len(known.rows), kept=kept)
    keeping = KeptBaselines(evaluator, store, name)
    ranges = search_ranges(
        request.ranges, agent, request.budget, keeping, session.recording, store, name, SearchWatch(options.stop, told)
    )
    problems = () if ranges.stopped else request.problems
    single = tune(problems, agent, request.budget, keeping, store, name, progress, options)
    library = replace(single, intervals=ranges.intervals)
    library.save(files.library)
    origin, measured = session.origin, len(store.recorded_pairs(name)) - kept
    if kept and not measured:  # the figures are those of an earlier session
        origin = {key: session.about.get(key, value) for key, value in origin.items()}
    decided = replace(library, rows=(*single.rows, *ranges.rows))
    rows = list(result_rows(decided, store, name, keeping))
    write_result(rows, {"suite": request.suite, "device": request.place, **origin}, files.result)
    searched = request.ranges.searched
    asked = len(request.problems) + sum(len(request.ranges.sampled(one, session.recording)) for one in searched)
    left = asked - len(decided.rows)
    write_json(files.run, {**session.about, **origin, "finished": utc_now(), "left": left})
    return TuneOutcome(library, files, decided, asked, len(searched), len(searched) - ranges.reached, kept, measured)


def _finished(request: TuneRequest, files: RunFiles, about: Mapping[str, Any]) -> Library | None:
    """Return the library of a run that is finished; None if this command may decide otherwise.

    Another release may. So may other budgets or intervals, whose decisions are read from the store again.
    """
    same = about.get("left") == 0 and about.get("outblas") == __version__
    if not same or request.budgets or request.ranges.ranges or not (files.library.exists() and files.result.exists()):
        return None
    library = Library.load(files.library)
    return library if [row.problem for row in library.rows] == list(request.problems) else None


def _files(request: TuneRequest, stamp: Mapping[str, Any] | None) -> RunFiles:
    """The files of a request's folder, or of that beside it; ``stamp`` is None if nothing is measured."""
    files = RunFiles(request.path)
    if request.beside and stamp is not None and files.run.exists() and other_conditions(read_run(files.run), stamp):
        return RunFiles(folder_beside(request.path, stamp))
    return files


@contextmanager
def _kept_times(evaluator: Evaluator, path: Path) -> Iterator[None]:
    """Write the seconds of each process by phase at the end of the block, or when an error ends it.

    They are those of this session. An evaluator that does not account for them, as a recording, leaves no file.
    """
    try:
        yield
    finally:
        accounts = getattr(evaluator, "accounts", None)
        if accounts is not None:
            write_json(path, {process: totals.to_json() for process, totals in accounts().items()})


def _ignore(*_about: object) -> None:
    return None


def _settings(request: TuneRequest, evaluator: Evaluator) -> TuneSettings:
    """The settings in ``run.json``; ``cuda:0`` may be another kind of GPU when a run goes on."""
    return TuneSettings(
        request.suite,
        _short(request.problems, request.suite),
        request.agent,
        request.budget,
        request.seed,
        request.place,
        evaluator.gpu.name,
        tuple(asked.key for asked in request.ranges.ranges),
    )


def _search_options(request: TuneRequest, clock: Callable[[], float]) -> SearchOptions:
    """The request's budgets and time limit; the clock starts now."""
    begin, seconds = clock(), request.seconds
    ends_early = request.budgets is not None or seconds is not None
    return SearchOptions(
        budgets=request.budgets,
        stop=lambda: seconds is not None and clock() - begin >= seconds,
        at_once=RANKED_AT_ONCE if ends_early else PROBLEMS_AT_ONCE,
        launch=request.launch,
    )


def _recorded(device: Device) -> Any:
    return part("recordings", f"--device {device}")


@contextmanager
def open_evaluator(device: Device, recording: RecordedDevice | None, workers: Workers | None) -> Iterator[Evaluator]:
    """Open the evaluator of a run; it is closed at the end of the ``with`` block.

    Args:
        device: the device; its GPU is used only if both other arguments are None.
        recording: recording to replay; None: the live GPU of ``device``.
        workers: workers that evaluate in place of the others, even of a recording; None: none.

    Yields:
        The evaluator: a pool of the workers, a replay of the recording, or the live GPU.
    """
    if workers is not None:
        with workers.open() as pool:
            yield pool
        return
    if recording is not None:
        yield _recorded(device).replay(recording)
        return
    from outblas.tune.live_evaluator import LiveEvaluator

    with LiveEvaluator(device.gpu_index or 0) as live:
        yield live


def _open(files: RunFiles, settings: TuneSettings, command: str, stamp: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make run.json, or check that it is of the same settings and conditions; returns run.json's content.

    ``stamp`` has the conditions of what is measured; None for a recording, which has its own.
    """
    wanted = json.loads(json_text(asdict(settings)))  # as it reads back from the file
    if files.run.exists():
        about = read_run(files.run)
        was = {key: about.get(key) for key in wanted}
        if "gpu" not in about:  # an earlier run does not say
            was["gpu"] = wanted["gpu"]
        was["ranges"] = about.get("ranges", [])  # nor does one from before there were intervals
        what = f"{files.path} contains a run with other settings"
        do = "repeat those settings to resume it, or pass another --run"
        check_same_settings(what, was, wanted, do)
        if stamp is not None and (odd := other_conditions(about, stamp)):
            what = f"{files.path} was measured under other conditions ({'; '.join(odd)})"
            raise UsageError(what, "comparable measurements", "pass another --run")
        return about
    about = {
        "format": FORMAT,
        "kind": "tune",
        **{key: value for key, value in wanted.items() if key != "ranges" or value},
        "outblas": __version__,
        **({} if stamp is None else {"stamp": dict(stamp)}),
        "command": command,
        "started": utc_now(),
    }
    write_json(files.run, about)
    return about


def _origin(evaluator: Evaluator, device: Device, recording: RecordedDevice | None, command: str) -> dict[str, Any]:
    """Provenance of the figures: the recording's where one was replayed, with the command that replayed it."""
    if recording is None:
        from outblas.records.provenance import collect_provenance

        told = getattr(evaluator, "provenance", None)  # of workers, which may be on other machines
        if told is not None:
            return {"provenance": told(command)}
        return {"provenance": collect_provenance(command, device.gpu_index or 0)}
    recorded = recording.provenance
    measured = {field: provenance_field(recorded, field) for field in PROVENANCE_FIELDS}
    return {
        "provenance": {**measured, "command": command},
        "recording": {"name": device.recording, "provenance": measured},
    }


def _short(problems: Sequence[Problem], suite: str) -> tuple[str, ...]:
    """Keys of single problems or of a sample; for a whole suite its layout, dtype and accumulator say it all."""
    if suite in ("custom", "captured") or (suite in SUITES and len(problems) % len(problems_of(suite))):
        return tuple(p.key for p in problems)
    return tuple(dict.fromkeys(f"{p.layout}_{p.dtype}_{p.acc}" for p in problems))
