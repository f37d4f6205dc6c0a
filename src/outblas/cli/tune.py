"""``outblas tune``: the main job, from problems to a library and a report; the problems of a program, to the user's
library."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.command_group import given_options
from outblas.cli.common import err, out
from outblas.core.errors import UsageError
from outblas.core.install_hint import lab_hint
from outblas.core.lab_parts import find_part
from outblas.core.problem import Problem
from outblas.core.weight import Weight
from outblas.runtime.device import Device, parse_device
from outblas.tune.intervals.model_ranges import check_engine

if TYPE_CHECKING:
    from outblas.records.library_row import LibraryInterval
    from outblas.tune.intervals.range_search import RangesRequest
    from outblas.tune.time_shares import TimeShare
    from outblas.tune.tune_run import TuneOutcome, TuneRequest

#: Measurements of a problem at most, but of --model.
USUAL_BUDGET = 16

AgentOption = Annotated[
    str | None,
    typer.Option(
        help="Search agent (see `outblas list agents`). Default: `transfer` with --model, `regressor` on a recording, "
        "otherwise `heuristic`."
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="Maximum number of candidates per problem, total time, or both, e.g. 32, 60s or 32,60s (default: 16 "
        "candidates, or 12 with --model). With --captured, the number of candidates is an average: problems with "
        "a larger share of the program's time get more."
    ),
]
CapturedOption = Annotated[
    Path | None,
    typer.Option(help="File from `outblas capture` with problems to tune, weighted by their share of program time."),
]
LinearOption = Annotated[
    list[str] | None, typer.Option(help="Weight N_K to tune for every M in the --m range. Repeatable.")
]
RangeOption = Annotated[str | None, typer.Option("--m", help="Range of M for --linear: FIRST:LAST (default: 1:8192).")]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="config.json of a model, or the model's directory. Only matmuls that the library lacks are tuned."
    ),
]
TpOption = Annotated[int, typer.Option(help="Tensor-parallel size for --model: number of GPUs that share each layer.")]
EngineOption = Annotated[str, typer.Option(help="Inference engine for --model; only vllm is supported.")]
IntervalsOption = Annotated[
    bool | None,
    typer.Option(
        "--intervals/--points",
        help="Tune each weight for its whole range of M (--intervals) or only for the listed values of M (--points). "
        "Default: --intervals for --captured weights with 3 or more values of M, --points for others.",
    ),
]
InstallOption = Annotated[
    bool | None,
    typer.Option(
        "--install/--no-install",
        help="Merge the fastest kernels into your user library, which outblas.matmul searches first. "
        "Default: on with --captured or --model, otherwise off.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help=f"GPU cuda:N or recording replay:NAME (default: cuda:0; without a GPU, replay:{common.DEFAULT_RECORDING})."
    ),
]


def tune(
    context: typer.Context,
    suite: common.SuiteOption = "grid1000",
    mnk: Annotated[list[str] | None, typer.Option(help="Problem M_N_K to tune instead of a suite. Repeatable.")] = None,
    linear: LinearOption = None,
    m: RangeOption = None,
    layout: common.LayoutOption = "tn",
    dtype: common.DtypeOption = "fp16",
    acc: common.AccOption = "fp32",
    agent: AgentOption = None,
    budget: BudgetOption = None,
    captured: CapturedOption = None,
    model: ModelOption = None,
    tp: TpOption = 1,
    engine: EngineOption = "vllm",
    intervals: IntervalsOption = None,
    install: InstallOption = None,
    device: DeviceOption = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory (default: named after the settings). An existing run is resumed.")
    ] = None,
    sample: common.SampleOption = None,
    seed: Annotated[int, typer.Option(help="Random seed for the agent and for --sample.")] = 0,
    workers: common.WorkersOption = None,
    gpus: common.GpusOption = None,
    worker_count: Annotated[
        int | None, typer.Option(help="Number of workers (default: 2 for a recording, one per GPU of a Ray cluster).")
    ] = None,
    ray_address: common.RayAddressOption = None,
) -> None:
    """Find the fastest proven kernel for each problem, then write a library, a result file and a report."""
    check_sources(context)
    kind = (layout, dtype, acc)
    suite, problems = named_problems(context, kind)
    count, seconds = budget_of(budget, model)
    budget = budget or str(count)
    plan = common.worker_plan(workers, device, gpus, worker_count, ray_address)
    where = parse_device(device) if plan is None else plan.device
    _check_install(install, where)
    ranked = [] if captured is None else _ranked(captured, where)

    from outblas.tune.time_shares import budgets
    from outblas.tune.tune_run import TuneRequest, folder_name

    begun = time.monotonic()
    ranges, single = ranges_and_others(context, kind, problems, ranked, where)
    problems = [one.problem for one in single] if ranked else problems if not ranges.ranges else []
    agent = _agent(agent, where, model)
    place = str(plan or where)
    path = run or Path("runs") / folder_name(suite, problems, agent, seed, budget, place, sample, ranges.ranges)
    dealt_out = budgets(single, count) if single else None
    request = TuneRequest(
        problems, suite, agent, count, seed, where, path, common.command_line(), plan, dealt_out, seconds, ranges,
        beside=run is None,
    )  # fmt: skip
    install = install or (install is None and suite in ("captured", "model"))
    one = _run if model is None else partial(_tune_model, context, begun)
    one(request, budget, ranked, install)


def _agent(named: str | None, where: Device, model: Path | None) -> str:
    """Return the agent that is named, or what is usual; raise UsageError if the named one is not installed."""
    from outblas.tune.agents.agent_registry import check_agent
    from outblas.tune.tune_run import default_agent

    if named is None:
        return default_agent(where) if model is None else "transfer"
    check_agent(named)
    return named


def _tune_model(
    context: typer.Context, begun: float, request: TuneRequest, budget: str, ranked: Sequence[TimeShare], install: bool
) -> None:
    """Tune what the library lacks of a model's products, then of its gates, whose rivals they are."""
    from outblas.tune.gate_run import tune_gates

    given = context.params
    dtype = given["dtype"] if given_options(context, "dtype") else None

    def gates() -> int:
        left = None if request.seconds is None else request.seconds - (time.monotonic() - begun)
        rest, say = replace(request, seconds=left), partial(err.print, markup=False)
        with common.progress_bar("gates") as bar:
            return tune_gates(model_file(context), given["tp"], dtype, rest, install, bar, say)

    if request.ranges.searched:
        _run(request, budget, ranked, install, gates)
        return
    found = gates()
    if not found:
        err.print("nothing to tune: the library has all matmuls of the model at the engine's sizes", markup=False)
    if common.wants_json():
        from outblas.cli.documents import TuneDocument

        common.print_document(TuneDocument(gates=found))


def _run(
    request: TuneRequest, budget: str, ranked: Sequence[TimeShare], install: bool,
    more: Callable[[], int] = lambda: 0,
) -> None:  # fmt: skip
    """Tune, install, report. Whatever keeps a report from being written, the library is installed by then.

    ``more`` is called with the library installed; it returns the number of gates that it has tuned.
    """
    from outblas.tune.tune_run import run_tune

    with common.progress_bar("tune") as progress:
        work = _Work(request, budget, progress)
        outcome = run_tune(request, work.single, told=work.ranges, begun=work.opened)
    files = outcome.files
    if outcome.kept and not outcome.measured and len(outcome.decided.rows) == outcome.asked:
        size = "1 problem" if outcome.asked == 1 else f"{outcome.asked} problems"
        err.print(f"run {files.path} is already finished: {size}; nothing to do", markup=False)
    if len(outcome.decided.rows) < outcome.asked:
        reached = f"tuned {len(outcome.decided.rows)} of {outcome.asked} problems"
        err.print(f"time limit reached: {reached}", markup=False)
    if outcome.open_weights:
        weights = f"{outcome.open_weights} of {outcome.weights} weights"
        err.print(f"intervals of {weights} are incomplete; rerun the command to continue", markup=False)
    _print_outcome(outcome, ranked)
    installed = _install(outcome, request) if install else None
    page_of_run = find_part("report")
    page = page_of_run(files.path, files.report) if page_of_run else f"none; {lab_hint()}"
    gates = 0
    try:
        gates = more()
    finally:  # the products are tuned, whatever becomes of the gates
        if common.wants_json():
            _print_document(outcome, ranked, installed, gates, page == str(files.report))
        out.print(f"report:  {page}", markup=False)


class _Work:
    """Says what a run does once there is something to wait for, and moves its bar: ranges first, then problems."""

    def __init__(self, request: TuneRequest, budget: str, bar: common.ProgressFn) -> None:
        self._request, self._budget, self._bar = request, budget, bar
        self._path, self._kept = request.path, 0
        self._begun = False
        self._ranges = 0

    def opened(self, path: Path, kept: int) -> None:
        """Take the folder of the run and the number of measurements that it has."""
        self._path, self._kept = path, kept

    def ranges(self, done: int, known: int, words: str) -> None:
        """Count a measurement of the search for intervals; the problems after it are estimated."""
        self._ranges = done
        if done <= self._kept:  # it is read from the store
            return
        self._begin()
        budgets = self._request.budgets or {}
        later = sum(budgets.get(problem, self._request.budget) for problem in self._request.problems)
        self._bar(done, known + later, words)

    def single(self, done: int, total: int, note: object = "") -> None:
        """Count a measurement of a single problem."""
        if self._ranges + done <= self._kept:
            return
        self._begin()
        self._bar(self._ranges + done, self._ranges + total, note)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True  # an error before this stands alone
        request = self._request
        weights = len(request.ranges.searched)
        parts = [f"{weights} weights for ranges of M"] if weights else []
        parts += [f"{len(request.problems)} problems"] if request.problems else []
        what = f"{' and '.join(parts)} of {request.suite} on {request.place}"
        err.print(f"tuning {what}, agent {request.agent}, budget {self._budget}", markup=False)
        if self._path != request.path:
            what = f"{request.path} was measured with another driver, NVRTC or OutBLAS release"
            err.print(f"{what}; using {self._path} instead", markup=False)
        if self._kept:
            err.print(f"resuming {self._path} with {self._kept} measurements", markup=False)


def _print_document(
    outcome: TuneOutcome, ranked: Sequence[TimeShare], installed: Path | None, gates: int, reported: bool
) -> None:
    from outblas.cli.documents import TunedLaunch, TuneDocument
    from outblas.tune.time_shares import weighted_speedup

    decided, files = outcome.decided, outcome.files
    launches = [
        TunedLaunch(
            launch=launch,
            geomean=decided.geomean(launch),
            fallbacks=decided.fallbacks(launch),
            weighted=weighted_speedup(ranked, decided, launch) if ranked else None,
        )
        for launch in decided.launches
    ]
    document = TuneDocument(
        asked=outcome.asked,
        tuned=len(decided.rows),
        intervals=len(outcome.library.intervals),
        gates=gates,
        kept=outcome.kept,
        launches=launches,
        library=str(files.library),
        result=str(files.result),
        report=str(files.report) if reported else None,
        installed=None if installed is None else str(installed),
    )
    common.print_document(document)


def _check_install(install: bool | None, where: Device) -> None:
    if install and where.recording is not None:
        wrong = f"--install conflicts with the recording {where}"
        raise UsageError(wrong, "times measured on this machine", "omit --install, or tune with --device cuda:0")


def budget_of(text: str | None, model: Path | None) -> tuple[int, float | None]:
    """Return (measurements per problem, seconds in all or None) of --budget, or what is usual for --model or without.

    Raises:
        UsageError: as :func:`parse_budget`.
    """
    from outblas.tune.intervals.range_search import ENGINE_BUDGET

    usual = USUAL_BUDGET if model is None else ENGINE_BUDGET
    return (usual, None) if text is None else parse_budget(text, usual)


def parse_budget(text: str, usual: int = USUAL_BUDGET) -> tuple[int, float | None]:
    """Return (measurements per problem, seconds in all or None).

    ``"16"`` gives ``(16, None)``, ``"60s"`` gives ``(usual, 60.0)``, and ``"32,60s"`` gives ``(32, 60.0)``.

    Raises:
        UsageError: another form, less than 1 measurement, or 0 seconds.
    """
    match = re.fullmatch(r"(?:(-?\d{1,9})(?:,(?=.)|$))?(?:(\d{1,9}(?:\.\d+)?)s)?", text.strip())
    if match is None or not (match[1] or match[2]):
        do = "pass e.g. --budget 16, --budget 60s or --budget 32,60s"
        raise UsageError(f"--budget {text!r} is invalid", "measurements per problem, total seconds, or both", do)
    count = common.at_least("--budget", int(match[1] or usual), 1)
    return count, None if match[2] is None else common.positive("--budget", float(match[2]))


def _ranked(file: Path, where: Device) -> list[TimeShare]:
    """The problems of a captured file, those that take most of its time first; says what is left out."""
    from outblas.tune.time_shares import captured_time_shares

    found, left_out = captured_time_shares(file, where)
    if left_out:
        err.print(left_out, markup=False)
    for one in found[:10]:
        err.print(f"{one.share:6.1%} of the time: {one.problem.key}, {one.count} x {one.us:.1f} us", markup=False)
    return found


def _print_outcome(outcome: TuneOutcome, ranked: Sequence[TimeShare]) -> None:
    from outblas.tune.time_shares import weighted_speedup

    decided, files = outcome.decided, outcome.files
    for launch in decided.launches:
        title = {"plain": "without PDL", "pdl": "with PDL", "weights": "constant weights"}[launch]
        fallbacks = f"{decided.fallbacks(launch)} of {len(decided.rows)} fall back to a baseline"
        weighted = f", all captured matmuls {weighted_speedup(ranked, decided, launch):.3f}x" if ranked else ""
        out.print(f"{title:<16} geomean {decided.geomean(launch):.3f}x, {fallbacks}{weighted}", markup=False)
    for weight in dict.fromkeys(one.weight for one in outcome.library.intervals):
        out.print(_intervals_words(weight, outcome.library.interval_index.of_weight(weight)), markup=False)
    out.print(f"library: {files.library}\nresult:  {files.result}", markup=False)


def _intervals_words(weight: Weight, intervals: Sequence[LibraryInterval]) -> str:
    """Return the intervals of a weight in one line: their number, their M, and how many have a kernel."""
    held = sum(one.last - one.first + 1 for one in intervals)
    kernels = sum(one.has_kernel for one in intervals)
    between = f"M {intervals[0].first}..{intervals[-1].last}"
    left_out = intervals[-1].last - intervals[0].first + 1 - held
    open_words = f", {left_out} M not covered" if left_out else ""
    return f"{weight.key}: {len(intervals)} intervals over {between}, {kernels} with a kernel{open_words}"


def _install(outcome: TuneOutcome, request: TuneRequest) -> Path | None:
    """Merge a run's library into the user's and return its path. None: figures of a recording are not installed."""
    say, files, where = err if common.wants_json() else out, outcome.files, request.device
    if where.recording is not None:
        how = f"outblas.use_library({str(files.library)!r})"
        say.print(f"not installed: measured on the recording {where}, not on this machine; use {how}", markup=False)
        return None
    from outblas.records.user_library import install
    from outblas.tune.tune_run import provenance_of

    done = install(outcome.library, provenance_of(files.path), launch=request.ranges.launch)
    aside = f"; the previous library, of another machine or release, is now {done.aside}" if done.aside else ""
    intervals = f", {done.intervals} intervals" if done.intervals else ""
    say.print(
        f"installed: {done.path} ({done.rows} problems, {done.changed} new or better{intervals}{aside})", markup=False
    )
    return done.path


#: Range of M of --linear.
WHOLE_RANGE = "1:8192"
_NOT_OF_A_MODEL = ("mnk", "captured", "linear", "m", "sample", "intervals", "layout", "acc")
#: Layout, dtype and accumulator.
Kind = tuple[str, str, str]


def check_sources(context: typer.Context) -> None:
    """Raise UsageError where `outblas tune` is given its problems in two ways, or an option that would be ignored."""
    given = context.params
    mnk, captured, sample, linear, model = (given[name] for name in ("mnk", "captured", "sample", "linear", "model"))
    if given_options(context, "suite") and (mnk or captured is not None or linear or model is not None):
        wrong = "--suite conflicts with --mnk, --captured, --linear and --model"
        raise UsageError(wrong, "only one of them", "omit the others")
    if linear and (mnk or captured is not None or sample is not None):
        raise UsageError("--linear conflicts with --mnk, --captured and --sample", "only --linear", "omit the others")
    if given["m"] is not None and not linear and model is None:
        raise UsageError("--m needs --linear", "a weight N_K", "pass e.g. --linear 4096_14336 --m 1:8192")
    if given["intervals"] is False and linear:
        raise UsageError("--points conflicts with --linear", "only one of them", "pass single problems as --mnk")
    if given["intervals"] and (mnk or sample is not None):
        wrong = "--intervals conflicts with --mnk and --sample"
        raise UsageError(wrong, "a suite, --captured or --linear", "omit the others")
    if mnk and sample is not None:
        raise UsageError("--sample conflicts with --mnk", "only one of them", "omit one")
    if captured is not None and (mnk or sample is not None):
        raise UsageError("--captured conflicts with --mnk and --sample", "only one of them", "omit the others")
    # Raise UsageError for options that do not go with --model, or with it alone.
    engine = given["engine"]
    others = ("tp", "engine") if model is None else _NOT_OF_A_MODEL
    for option in given_options(context, *others).values():
        if model is None:
            raise UsageError(f"{option} needs --model", "a model's config.json", "add --model config.json")
        raise UsageError(f"--model conflicts with {option}", "only one of them", "omit one")
    check_engine(engine)


def named_problems(context: typer.Context, kind: Kind) -> tuple[str, list[Problem]]:
    """Return the name of what is tuned, and the problems that the command line or a suite names."""
    given = context.params
    if given["captured"] is not None or given["model"] is not None:
        return "model" if given["captured"] is None else "captured", []
    if given["mnk"]:
        return "custom", list(dict.fromkeys(Problem.from_mnk(one, *kind) for one in given["mnk"]))
    if given["linear"]:
        return "linear", []
    layout, dtype, acc = kind
    suite = given["suite"]
    return suite, common.suite_problems(suite, (layout,), dtype, acc, given["sample"], given["seed"])


def ranges_and_others(
    context: typer.Context, kind: Kind, problems: Sequence[Problem], ranked: list[TimeShare], where: Device
) -> tuple[RangesRequest, list[TimeShare]]:
    """Return the ranges to tune, and the captured problems that are tuned by themselves.

    Args:
        ranked: captured problems, the largest share of the time first.
    """
    from outblas.tune.intervals.range_search import RangesRequest, linear_ranges, ranges_of_suite, split_captured

    given = context.params
    if given["model"] is not None:
        dtype = kind[1] if given_options(context, "dtype") else None
        return _model_ranges(model_file(context), given["tp"], dtype, where), []
    if ranked and given["intervals"] is not False:
        return split_captured(ranked)
    linear = linear_ranges(given["linear"] or (), given["m"] or WHOLE_RANGE, kind)
    if given["intervals"] and problems:
        return ranges_of_suite(given["suite"], problems), ranked
    return RangesRequest(linear), ranked


def model_file(context: typer.Context) -> Path:
    """Return what ``--model`` names; typer up to 0.28 leaves it as text in ``context.params``."""
    return Path(context.params["model"])


def _model_ranges(file: Path, tp: int, dtype: str | None, where: Device) -> RangesRequest:
    from outblas.tune.intervals.model_ranges import lacking_ranges, weights_of_file

    weights, _ = weights_of_file(file, tp, dtype, where)
    for one in weights:
        err.print(one.words, markup=False)
    found = lacking_ranges(weights)
    if found.searched and where.recording is not None:
        raise UsageError(f"--model cannot be tuned on {where}", "a GPU to measure on", "pass --device cuda:0")
    return found
