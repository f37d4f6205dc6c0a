"""Time a library over a suite against every baseline, in one interleaved run per problem.

A fresh process and fresh inputs: these are the figures that are published, free of the bias of the
search that chose the kernels. Two rows per problem, PDL not allowed and PDL allowed, timed in the same
rounds.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from outblas.core.child_process import LoneContext, end_with_parent
from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.rivals import BENCH_BASELINES, LT_AUTO, RIVALS, fastest_baseline
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.core.stats import geomean
from outblas.core.workload import workload_of_mode
from outblas.judge.bench_cell import Options
from outblas.judge.fallback_entry import FALLBACK, SECOND_ALGORITHM
from outblas.judge.rounds import speedup
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.parquet import check_parquet
from outblas.records.provenance import collect_provenance, gpu_state, shared_conditions, source_commit, start_of_machine
from outblas.records.result_rows import launch_columns
from outblas.records.results import COLUMNS, Row, write_result
from outblas.runtime.device import gpu_of_device
from outblas.tune.live_evaluator import Baselines, LiveEvaluator

#: Called as (problems done, number of problems, geometric mean of the published speed-ups so far).
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class BenchRequest:
    """The settings of one run of :func:`run_bench`.

    Attributes:
        gpu_indices: CUDA indices of the GPUs, which share the problems. Mode ``server`` uses those for which the host
            has enough cores (:func:`serving_gpus`).
        seed: seed of the operands and of the order within a round.
        baselines: names of the baselines to time. A run without those that are no rivals is quicker.
        one_start: all figures must be of one start of the machine. A journal of an earlier start is refused then.
        proved: names of kernels that passed every gate before. They must come from the same sources and toolchain, for
            the same layout, dtype and accumulator. Every kernel is still proved on the timed operands.
    """

    problems: Sequence[Problem]
    suite: str
    library: Path | Library | None
    out_path: Path
    gpu_indices: Sequence[int] = (0,)
    mode: str = "offline"
    rounds: int = 9
    resume: bool = True
    target_qps: float | None = None
    seed: int = 1
    baselines: Sequence[str] = BENCH_BASELINES
    one_start: bool = False
    proved: frozenset[str] = frozenset()


def run_bench(request: BenchRequest, progress: Progress | None = None) -> Path:
    """Bench the problems; write the result file, a Parquet file that ``read_result`` reads, and return its path.

    A killed run resumes from the journal ``<out_path>.jsonl``, which is deleted once the file is written. It resumes
    only with the same GPU, driver and toolchain. If the commit or the start of the machine is another, the file's
    provenance names all of them, joined by ``; ``. Several GPUs share the problems.

    Args:
        progress: called after every newly timed problem with (problems done, all problems, geometric mean so far).

    Raises:
        RecordError: the library does not exist, or a file cannot be written.
        DeviceError: a GPU does not exist.
        UsageError: the journal was begun with other settings, driver or toolchain, or the GPUs are of two kinds.
        ToolchainMissing: pyarrow or a part of CUDA is not installed.
    """
    check_parquet()
    problems, gpu = request.problems, gpu_of_device(request.gpu_indices[0])
    if kinds := sorted({gpu_of_device(index).name for index in request.gpu_indices} - {gpu.name}):
        wrong = f"the GPUs are of different models: {', '.join((gpu.name, *kinds))}"
        expected = "GPUs of the same model, because the figures in a file are compared with each other"
        raise UsageError(wrong, expected, "pass GPUs of the same model in --gpus")
    library = Library.packaged(gpu.name) if request.library is None else request.library
    library = library if isinstance(library, Library) else Library.load(library)
    path = request.out_path.with_name(request.out_path.name + ".jsonl")
    settings = {
        "suite": request.suite, "mode": request.mode, "rounds": request.rounds, "seed": request.seed,
        "target_qps": request.target_qps, "library": library.sha(), "kernels": kernels_sha(),
        "problems": [p.key for p in request.problems], "baselines": list(request.baselines), "gpu": gpu.name,
        "measured_with": shared_conditions(request.gpu_indices[0]),
        **({"machine": start_of_machine()} if request.one_start else {}),
    }  # fmt: skip
    journal = Journal(path, settings, request.resume)
    done = {entry["problem"] for entry in journal.entries}
    todo = [p for p in problems if p.key not in done]
    written, made = False, {"commit": source_commit(), "machine": start_of_machine()}
    try:
        options = Options(
            0, gpu, rounds=request.rounds, seed=request.seed, level="full", mode=request.mode,
            baselines=tuple(request.baselines), proved=request.proved,
        )  # fmt: skip
        for entry in _entries(todo, library, request, options):
            journal.append({**entry, **made})
            if progress is not None:
                # The last row of a problem: PDL allowed, or the only one (server mode).
                published = [e["rows"][-1]["published"] for e in journal.entries]
                progress(len(journal.entries), len(problems), geomean(published))
        by_key = {entry["problem"]: entry["rows"] for entry in journal.entries}
        rows = [row for p in problems for row in by_key[p.key]]
        about = collect_provenance(f"outblas bench --suite {request.suite}", request.gpu_indices[0])
        seconds = round(sum(entry.get("gpu_seconds", 0.0) for entry in journal.entries), 1)
        provenance = {
            **about,
            "kernels": kernels_sha(),
            **{key: "; ".join(dict.fromkeys(entry[key] for entry in journal.entries)) for key in made},
            "gpus": len(_used_gpus(request)),
            "gpu_seconds": seconds,
            "library": dict(library.provenance),
        }
        write_result(rows, {"suite": request.suite, "provenance": provenance}, request.out_path)
        written = True
    finally:
        journal.close(done=written)
    return request.out_path


def _used_gpus(request: BenchRequest) -> Sequence[int]:
    return serving_gpus(request.gpu_indices) if request.mode == "server" else request.gpu_indices


def _entries(
    todo: Sequence[Problem], library: Library, request: BenchRequest, options: Options
) -> Iterator[dict[str, Any]]:
    """Yield journal entries as they finish; each GPU has a thread and a worker: sandboxed, or one that serves."""
    if request.mode == "server":
        return _served_entries(todo, library, request)

    @contextmanager
    def station(index: int) -> Iterator[Callable[[Problem], dict[str, Any]]]:
        with _Station(index, library, request.mode, options) as opened:
            opened.expect(todo)
            if index == request.gpu_indices[0]:
                opened.compile_soon(todo)
            yield lambda problem: _entry(problem, opened.rows)

    return entries_of_gpus(todo, request.gpu_indices, station)


def _served_entries(todo: Sequence[Problem], library: Library, request: BenchRequest) -> Iterator[dict[str, Any]]:
    """Yield the journal entries of mode ``server`` as they finish."""
    from outblas_lab.pool.served_rows import server_rows

    gpu, gpus = gpu_of_device(request.gpu_indices[0]), _used_gpus(request)

    @contextmanager
    def station(index: int) -> Iterator[Callable[[Problem], dict[str, Any]]]:
        with caller(alone=len(gpus) == 1) as call:

            def rows(problem: Problem) -> list[Row]:
                part = library.restricted_to([problem])
                return call(server_rows, problem, part, index, gpu, request.target_qps)

            yield lambda problem: _entry(problem, rows)

    longest_first = sorted(todo, key=lambda p: p.flops, reverse=True)  # the last one occupies a GPU alone
    return entries_of_gpus(longest_first, gpus, station)


def _entry(problem: Problem, rows: Callable[[Problem], list[Row]]) -> dict[str, Any]:
    """Return the journal's entry of a problem, with the seconds that it took of its GPU."""
    begin = monotonic()
    return {"problem": problem.key, "rows": rows(problem), "gpu_seconds": round(monotonic() - begin, 3)}


class _Station(AbstractContextManager["_Station"]):
    """The evaluator of one GPU in a bench, and the rows that it makes."""

    def __init__(self, gpu_index: int, library: Library, mode: str, options: Options) -> None:
        self._index, self._library, self._mode = gpu_index, library, mode
        self._gpu = gpu_of_device(gpu_index)
        self._evaluator = LiveEvaluator(gpu_index, replace(options, gpu_index=gpu_index, gpu=self._gpu))

    def __exit__(self, *_: object) -> None:
        self._evaluator.close()

    def expect(self, problems: Sequence[Problem]) -> None:
        """Announce problems that come next, on this GPU or on another."""
        self._evaluator.expect(problems)
        rows = {problem: self._library.lookup(problem) for problem in problems}
        self._evaluator.time_fallbacks(
            {
                problem: row.fallback if row else ""
                for problem, row in rows.items()
                if row is None or any(FALLBACK in self._picks(row, launch) for launch in self._library.launches)
            }
        )
        seconds = {p: row.second_winner("plain", workload_of_mode(self._mode)) for p, row in rows.items() if row}
        self._evaluator.time_second_algorithms({p: second.algorithm for p, second in seconds.items() if second})

    def _picks(self, row: LibraryRow | None, launch: Launch) -> tuple[KernelConfig | str, ...]:
        """Return what a row runs under the mode's workload; then, with a second winner, what the plain choice runs.

        Without a kernel, it is the name of a baseline: the fall-back, or the algorithm of the second winner.
        """
        if row is None:
            return (FALLBACK,)
        workload = workload_of_mode(self._mode)
        picked = row.kernel(launch, workload) or FALLBACK
        second = row.second_winner(launch, workload)
        if second is None:
            return (picked,)
        return (SECOND_ALGORITHM if second.algorithm else picked, row.kernel(launch) or FALLBACK)

    def compile_soon(self, problems: Sequence[Problem]) -> None:
        """Start to compile the library's kernels of these problems into the cache that all GPUs here share."""
        installed = self._library.restricted_to(problems).kernels()
        self._evaluator.compile_soon((p, config) for p, configs in installed.items() for config in configs)

    def rows(self, problem: Problem) -> list[Row]:
        """Return the result rows of one problem: one per launch option of the library."""
        row = self._library.lookup(problem)
        launches = LAUNCHES[:1] if self._mode == "block" else self._library.launches
        picks = {launch: self._picks(row, launch) for launch in launches}
        configs = list(dict.fromkeys(c for configs in picks.values() for c in configs if not isinstance(c, str)))
        found = {e.config: e for e in self._evaluator.evaluate([(problem, c) for c in configs])}
        report = self._evaluator.baseline_report(problem)
        state = gpu_state(self._index)
        out = []
        for launch, picked in picks.items():
            ran, *plain = (
                _row(problem, launch, self._mode, pick if isinstance(pick, str) else found[pick], report, self._gpu)
                for pick in picked
            )
            for other in plain:  # the plain choice, beside its second winner
                ran |= {"plain_config": other["config"], "plain_us": other.get("ours_us")}
                ran["plain_speedup"] = other["published"]
            out.append({**ran, **state})
        return out


def _row(problem: Problem, launch: Launch, mode: str, ran: Evaluation | str, report: Baselines, gpu: Gpu) -> Row:
    """Return the row of a launch option; ``ran`` is its kernel's evaluation, or the baseline that runs without one."""
    times = {name: timing.median_us for name, timing in report.timings.items()}
    if not any(name in times for name in RIVALS):
        raise report.none_timed(problem)
    best = fastest_baseline(times)
    timing = report.timings[best]
    row: Row = {
        **problem.to_json(),
        "mode": mode,
        **launch_columns(launch),
        "floor_us": floor_us(problem, gpu),
        "regime": regime(problem, gpu),
        "rounds": len(timing.samples_us),
        "repeats": timing.repeats,
        "operand_sets": timing.operand_sets,
        **{f"{name}_us": us for name, us in times.items() if f"{name}_us" in COLUMNS},
        "lt_auto_detail": report.details.get(LT_AUTO),
    }
    evaluation = None if isinstance(ran, str) else ran
    if evaluation is None or evaluation.speedup is None or evaluation.timing is None:
        return {
            **row,
            "config": "",
            "status": (evaluation.status if evaluation else Status.LEFT_OUT).value,
            "fallback": True,
            "baseline": best,
            "baseline_us": times[best],
            "baseline_detail": report.details.get(best),
            **_fallback_columns(report, ran if isinstance(ran, str) else FALLBACK),
        }
    gain = evaluation.speedup
    return {
        **row,
        "config": config_name(evaluation.config),
        "ran": config_name(evaluation.config),
        "status": evaluation.status.value,
        "fallback": False,
        "ours_us": evaluation.timing.median_us,
        "ours_spread": evaluation.timing.spread,
        "baseline": gain.baseline,
        "baseline_us": evaluation.baselines_us[gain.baseline],  # of the same rounds
        "ours_mhz": evaluation.timing.sm_mhz,
        "baseline_mhz": report.timings[gain.baseline].sm_mhz if gain.baseline in report.timings else None,
        "baseline_detail": report.details.get(gain.baseline),
        "speedup": gain.ratio,
        "low": gain.low,
        "high": gain.high,
        "published": gain.ratio,
    }


def _fallback_columns(report: Baselines, name: str) -> Row:
    """Return the columns of what ran without a kernel, timed like all others; 1 is published if it was not timed."""
    timing = report.timings.get(name)
    if timing is None:
        return {"published": 1.0}
    found = speedup(report.timings, name, RIVALS)
    return {
        "ran": report.details[name],
        "ours_us": timing.median_us,
        "ours_spread": timing.spread,
        "ours_mhz": timing.sm_mhz,
        "baseline_mhz": report.timings[found.baseline].sm_mhz,
        "speedup": found.ratio,
        "low": found.low,
        "high": found.high,
        "published": found.ratio,
    }


#: Opened for a GPU's index; yields a function that times one problem and returns the entry of its journal.
Station = Callable[[int], AbstractContextManager[Callable[[Problem], dict[str, Any]]]]


def entries_of_gpus(todo: Sequence[Problem], gpus: Sequence[int], station: Station) -> Iterator[dict[str, Any]]:
    """Yield the entries of problems as they finish, in no fixed order.

    Args:
        station: opened once for each GPU, in that GPU's thread.

    Raises:
        Exception: a station raised it. What the others had finished is yielded before.
    """
    work: queue.SimpleQueue[Problem] = queue.SimpleQueue()
    for problem in todo:
        work.put(problem)
    results: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def serve(index: int) -> None:
        try:
            with station(index) as entry_of:
                while not stop.is_set():
                    try:
                        problem = work.get_nowait()
                    except queue.Empty:
                        break
                    results.put(entry_of(problem))
            results.put(None)
        except BaseException as error:  # handed to the main thread, which raises it
            results.put(error)

    threads = [threading.Thread(target=serve, args=(index,), daemon=True) for index in gpus]
    for thread in threads:
        thread.start()

    def end() -> None:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)

    try:
        running = len(threads)
        while running:
            item = results.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                end()
                while not results.empty():  # what the other GPUs finished meanwhile: a resumed run keeps it
                    finished = results.get()
                    if isinstance(finished, dict):
                        yield finished
                raise item
            else:
                yield item
    finally:
        end()


T = TypeVar("T")
#: Cores of the host for each GPU that serves. One polls for completions; threads of torch and the driver need others.
CORES_PER_GPU = 4


def serving_gpus(gpus: Sequence[int], cores: int | None = None) -> tuple[int, ...]:
    """Return the GPUs that may serve requests at the same time: the first ones, at least one.

    Args:
        cores: cores that this process may use; None: as the system says.
    """
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return tuple(gpus[: max(1, usable // CORES_PER_GPU)])


@contextmanager
def caller(alone: bool) -> Iterator[Callable[..., T]]:
    """Yield ``call(function, *arguments)``, which returns what the function does, or raises what it raises.

    Args:
        alone: True calls in this process. False calls in a process of its own, which starts at the first call and ends
            with the block. Function, arguments and result must pickle then.
    """
    if alone:
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, LoneContext(), end_with_parent, (os.getpid(),)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()
