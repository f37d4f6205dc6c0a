"""The handler of the sandboxed worker: compile -> static gate -> prove -> time, a batch of pairs at a time.

A bad candidate becomes an Evaluation with its status; only a lost CUDA context ends the worker.

Its seconds (outblas.core.phase_times) belong to one of these phases, each with a counter:

=========  ==========================================================================================================
start      slow first steps of a process: imports, CUDA's context, the first kernels of torch and cuBLAS
idle       no batch in hand
operands   a problem's operands, reference and bound: once per problem that follows another (``desks``)
autotune   lt_auto's choice of an algorithm: once per problem and worker (``algorithms chosen``)
baselines  graphs of the baselines, nvmmh's kernel compiled (unless it was before), loaded and proved: once per desk
load       a kernel compiled (unless it was before), checked and loaded: once per kernel and worker (``kernels loaded``)
prove      a kernel proved in full (``kernels proved``)
cell       a candidate bound, and proved on the operands that are timed (``candidates``)
capture    its graph
time       rounds of a chunk and its baselines (``chunks``)
recheck    a candidate proved again after timing
batch      all else
=========  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.config import Candidate, KernelConfig, KernelKind, config_name, kernel_kind, launch_of
from outblas.core.errors import CompileError, DeviceError, OutblasError, ToolchainMissing
from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.core.phase_times import PhaseTimer
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, RIVALS, Bindable
from outblas.core.roofline import architecture
from outblas.judge import faults
from outblas.judge.baselines import AlgorithmCache
from outblas.judge.bench_cell import UNFUSED, Baselines, BenchCell, Options
from outblas.judge.fallback_entry import FALLBACK, SECOND_ALGORITHM, FallbackEntry
from outblas.kernels.proof_shapes import proof_shapes
from outblas.workers.sandbox import Emit

if TYPE_CHECKING:
    from outblas.judge.rounds import Prune
    from outblas.judge.trials import TrialCache
    from outblas.runtime.cubin import Cubin

#: What a worker times before it is asked for anything.
_WARM_UP = Problem(256, 256, 256)


def make_handler(options: Options) -> Handler:
    """Return a new :class:`Handler` after its :meth:`Handler.warm_up`, whose errors it raises.

    It is the factory of a sandbox: ``Sandbox("outblas.workers.handler:make_handler", (Options(gpu_index=0),))``.
    """
    handler = Handler(options)
    handler.warm_up()
    return handler


class Handler:
    """The evaluator inside a worker. Call it with a batch to evaluate its items.

    A call takes a list of (index, :class:`WorkItem`) and an :class:`outblas.workers.sandbox.Emit`, and returns None.
    Through the latter it sends one answer for each item: a pair (Evaluation or None, Baselines or None). The evaluation
    is None for an item without a config. The baselines are None if the candidate failed before it was timed. A bad
    candidate raises nothing: ``evaluation.status`` tells.
    """

    def __init__(self, options: Options) -> None:
        from outblas.judge.baselines import make_baselines

        self.phase_timer = PhaseTimer("idle")
        self._options = options
        self._baselines = make_baselines(options.gpu_index, options.baselines)
        self._fallbacks = {name: FallbackEntry(options.gpu_index, name) for name in (FALLBACK, SECOND_ALGORITHM)}
        if options.algorithms is not None and LT_AUTO in self._baselines:
            kept = AlgorithmCache.of_gpu(Path(options.algorithms), options.gpu_index)
            self._baselines[LT_AUTO].use_cache(kept)
        self._kernels: dict[KernelKind, Any] = {}
        self._proved: dict[KernelKind, Verdict] = {}
        self._trials: TrialCache | None = None
        self._bench_cell: BenchCell | None = None

    def __call__(self, items: list[tuple[int, WorkItem]], emit: Emit) -> None:
        with self.phase_timer.phase("batch"):
            for problem, group in groupby(items, key=lambda item: item[1].problem):
                self._problem(problem, list(group), emit)

    def warm_up(self) -> None:
        """Time the baselines of a 256x256x256 product once, so that slow first steps of the process are done.

        Such are the import of torch, the context of CUDA and the start of cuBLAS, seconds in all. A baseline that fails
        is ignored.

        Raises:
            ToolchainMissing: a wheel is missing.
            DeviceError: the GPU cannot be used.
            RuntimeError: torch cannot use the GPU, for example for lack of memory.
        """
        options = replace(self._options, warmup_seconds=0.0, benchmark_seconds=0.0)
        with self.phase_timer.phase("start"):
            if "nvmmh" in self._baselines:
                self._baselines["nvmmh"].set_configs({_WARM_UP: None})
            bench_cell = BenchCell(_WARM_UP, options, self._baselines, PhaseTimer("start"))
            try:
                if bench_cell.graphs:
                    bench_cell.measure_baselines(options)
            finally:
                bench_cell.close()

    def _problem(self, problem: Problem, items: list[tuple[int, WorkItem]], emit: Emit) -> None:
        emit.begin(None)
        try:
            bench_cell = self._at(problem, items[0][1])
        except ToolchainMissing:
            raise
        except (OutblasError, RuntimeError) as error:  # too large for this GPU's memory, say
            self._give_up(problem, items, faults.first_line(faults.raise_if_context_lost(error)), emit)
            return
        waiting: list[tuple[int, ProvenCandidate]] = []
        for index, item in items:
            if item.config is None:
                emit.done(index, (None, bench_cell.measure_baselines(self._options)))
                continue
            emit.begin(index)
            tried = self._try(bench_cell, item, item.config, emit, index)
            if isinstance(tried, Evaluation):
                emit.done(index, (tried, None))
                continue
            waiting.append((index, tried))
            if len(waiting) == self._options.chunk:
                self._time(bench_cell, waiting, emit)
                waiting = []
        if waiting:
            self._time(bench_cell, waiting, emit)

    def _give_up(self, problem: Problem, items: list[tuple[int, WorkItem]], detail: str, emit: Emit) -> None:
        for index, (_, config, *_) in items:
            if config is None:
                emit.done(index, (None, Baselines(left_out={"all": detail})))
            else:
                emit.done(index, (Evaluation(problem, config, Status.LAUNCH_ERROR, detail), None))

    def _at(self, problem: Problem, item: WorkItem) -> BenchCell:
        if self._bench_cell is None or self._bench_cell.problem != problem:
            if self._bench_cell is not None:
                self._bench_cell.close()
                self._bench_cell = None
            if "nvmmh" in self._baselines:
                self._baselines["nvmmh"].set_configs({problem: item.nvmmh})
            baselines = self._entries(problem, item)
            self.phase_timer.count("desks")
            try:
                self._bench_cell = self._new_cell(problem, baselines)
            except (OutblasError, RuntimeError):
                if self._trials is None or not self._trials.bytes:
                    raise
                self._trials.clear()  # there may be room without them
            self._bench_cell = self._bench_cell or self._new_cell(problem, baselines)
        return self._bench_cell

    def _new_cell(self, problem: Problem, baselines: dict[str, Any]) -> BenchCell:
        return BenchCell(problem, self._options, baselines, self.phase_timer)

    def _entries(self, problem: Problem, item: WorkItem) -> dict[str, Any]:
        baselines = dict(self._baselines)
        for name, algorithm in ((FALLBACK, item.fallback), (SECOND_ALGORITHM, item.second or None)):
            if algorithm is not None:
                self._fallbacks[name].name_algorithm(problem, algorithm)
                baselines[name] = self._fallbacks[name]
        return baselines

    def _try(
        self, bench_cell: BenchCell, item: WorkItem, config: Candidate, emit: Emit, index: int
    ) -> Evaluation | ProvenCandidate:
        """Everything up to a captured graph; a failure is an Evaluation."""

        def failed(status: Status, detail: str, verdict: Verdict | None = None) -> Evaluation:
            return Evaluation(bench_cell.problem, config, status, detail, verdict or Verdict(status, (), detail))

        self.phase_timer.count("candidates")
        reason = self._why_illegal(bench_cell.problem, config)
        if reason is not None:
            return failed(Status.ILLEGAL, reason)
        try:
            with self.phase_timer.phase("load"):
                kernel, counters = self._kernel_of(item)
        except CompileError as error:
            return failed(Status.COMPILE_ERROR, str(error))
        except _Static as static:
            return failed(Status.STATIC_REJECTED, str(static))
        except DeviceError as error:  # the driver cannot load it
            return failed(Status.LAUNCH_ERROR, faults.first_line(faults.raise_if_context_lost(error)))
        try:
            proved = item.proved or config_name(config) in self._options.proved
            verdict = self._prove(bench_cell, kernel, config, proved, emit, index)
            if verdict.status is not Status.PASSED:
                return failed(verdict.status, verdict.detail, verdict)
            with self.phase_timer.phase("capture"):
                return ProvenCandidate(config, self._ready(bench_cell, kernel), verdict, counters)
        except ToolchainMissing:
            raise
        except Exception as error:  # whatever a candidate raises is its own failure
            return failed(Status.LAUNCH_ERROR, faults.first_line(faults.raise_if_context_lost(error)))

    def _why_illegal(self, problem: Problem, config: Any) -> str | None:
        from outblas.kernels.legality import why_illegal

        return why_illegal(problem, config, self._options.gpu)

    def _kernel_of(self, item: WorkItem) -> tuple[Any, dict[str, float]]:
        """Return the loaded kernel of an item, and its counters."""
        assert item.config is not None
        return self._kernel(item.problem, item.config)

    def _kernel(self, problem: Problem, config: Any) -> tuple[Any, dict[str, float]]:
        """Compile a kernel, check it by gate 1 and load it; return it with its counters."""
        from outblas.kernels.source import make_source
        from outblas.runtime.nvrtc import compile_source
        from outblas.runtime.sass import check_static

        key = kernel_kind(problem, config)
        if key not in self._kernels:
            self.phase_timer.count("kernels loaded")
            source = make_source(problem, config, self._options.epilogue)
            cubin = compile_source(source, architecture(self._options.gpu))
            reason = check_static(cubin.facts, source, cubin)
            if reason is not None:
                raise _Static(reason)
            counters = {"registers": float(cubin.registers), "compile_seconds": cubin.compile_seconds}
            self._kernels[key] = (self._loaded(cubin, config), counters)
        return self._kernels[key]  # type: ignore[no-any-return]

    def _loaded(self, cubin: Cubin, config: Any) -> Any:
        """Return a compiled kernel as an entry of the clock."""
        from outblas.runtime.launch import load

        return load(cubin, config)

    def _prove(
        self, bench_cell: BenchCell, kernel: Bindable, config: Any, proved: bool, emit: Emit, index: int
    ) -> Verdict:
        full: Verdict | None = None
        if self._options.level == "full" and not proved:
            key = kernel_kind(bench_cell.problem, config)
            if key not in self._proved:
                self.phase_timer.count("kernels proved")
                small = self._proof_shapes(bench_cell.problem, config)
                with self.phase_timer.phase("prove"):
                    problems_with_sign = _with_sign_of_life(small or [bench_cell.problem], emit, index)
                    self._proved[key] = self._proof(kernel, problems_with_sign)
            full = self._proved[key]
            if full.status is not Status.PASSED:
                return full
            emit.begin(index)
        with self.phase_timer.phase("cell"):
            cell = bench_cell.prover.call(kernel.bind(bench_cell.problem, *bench_cell.bench.operands(0)))
        if cell.status is Status.MEMORY_VIOLATION and self._trials is not None:
            self._trials.clear()  # it may have written there, too
        if cell.status is not Status.PASSED or full is None:
            return cell
        return Verdict(Status.PASSED, full.gates, "", max(full.max_err_ratio or 0.0, cell.max_err_ratio or 0.0))

    def _proof_shapes(self, problem: Problem, config: Any) -> list[Problem]:
        return proof_shapes(problem, config, self._options.gpu)

    def _proof(self, kernel: Any, problems: Iterable[Problem]) -> Verdict:
        from outblas.judge.gates import prove_on_all

        return prove_on_all(kernel, problems, self._options.gpu_index, self._trial_cache())

    def _trial_cache(self) -> TrialCache:
        """Return the cache of proof inputs and references, kept from kernel to kernel."""
        from outblas.judge.trials import TrialCache

        self._trials = self._trials or TrialCache.of_gpu(self._options.gpu_index)
        return self._trials

    def _time(self, bench_cell: BenchCell, waiting: list[tuple[int, ProvenCandidate]], emit: Emit) -> None:
        """Time a chunk in the same rounds as the baselines, answer each and free their graphs."""
        from outblas.judge.rounds import speedup

        alone = waiting[0][0] if len(waiting) == 1 else None
        emit.begin(alone)
        options = self._options
        graphs: dict[str, Any] = {str(index): candidate.graph for index, candidate in waiting}
        try:
            kinds = {str(index): launch_of(candidate.config) for index, candidate in waiting}
            prune = bench_cell.prune(options, kinds)
            self.phase_timer.count("chunks")
            with self.phase_timer.phase("time"):
                timings = self._measure(bench_cell, graphs, prune)
            baselines = bench_cell.report(timings)
            rivals = [name for name in (*RIVALS, UNFUSED) if name in timings]
            with self.phase_timer.phase("recheck"):
                whole = not options.recheck or bench_cell.prover.operands_intact()
            for index, candidate in waiting:
                with self.phase_timer.phase("recheck"):
                    after = (
                        self._again(bench_cell, candidate, timings[str(index)], baselines) if whole else _OVERWRITTEN
                    )
                if after.status is not Status.PASSED:
                    detail = f"after timing: {after.detail}"
                    value = Evaluation(bench_cell.problem, candidate.config, after.status, detail, after)
                else:
                    value = Evaluation(
                        bench_cell.problem,
                        candidate.config,
                        Status.PASSED,
                        after.detail,
                        candidate.verdict,
                        timings[str(index)],
                        {name: t.median_us for name, t in baselines.timings.items()},
                        speedup(timings, str(index), rivals, options.seed)
                        if rivals and options.rounds >= 3 and options.speedups
                        else None,
                        candidate.counters,
                    )
                emit.done(index, (value, baselines))
        except (OutblasError, RuntimeError) as error:
            raise faults.raise_if_context_lost(error) from error
        finally:
            for graph in graphs.values():
                graph.free()

    def _ready(self, bench_cell: BenchCell, kernel: Any) -> Any:
        """Return what is timed of a proven kernel: its graph."""
        return bench_cell.bench.capture(kernel)

    def _measure(self, bench_cell: BenchCell, graphs: dict[str, Any], prune: Prune) -> dict[str, Timing]:
        return bench_cell.measure({**bench_cell.graphs, **graphs}, self._options, prune)

    def _again(
        self, bench_cell: BenchCell, candidate: ProvenCandidate, timing: Timing, baselines: Baselines
    ) -> Verdict:
        """Prove the candidate again after timing, on a replay of the timed graph."""
        return bench_cell.prover.graph(candidate.graph.executable) if self._options.recheck else candidate.verdict


def _with_sign_of_life(problems: Iterable[Problem], emit: Emit, index: int) -> Iterator[Problem]:
    """The problems, with a sign of life before each: every proof has the time limit to itself."""
    for problem in problems:
        emit.begin(index)
        yield problem


@dataclass
class ProvenCandidate:
    """A candidate that is proved and captured, and waits to be timed.

    Attributes:
        graph: its captured graph, or a free kernel's :class:`outblas_lab.jail.judged_clock.JudgedEntry`.
        counters: ``{"registers": R, "compile_seconds": S}``: registers per thread, and seconds that its compilation
            took (0.0 from the cache).
    """

    config: Candidate
    graph: Any
    verdict: Verdict
    counters: dict[str, float]


#: Applies to all that were timed together: whichever candidate wrote, their times are of other operands.
_OVERWRITTEN = Verdict(Status.MEMORY_VIOLATION, ("static",), "it, or one timed with it, overwrote an input or a canary")


class _Static(Exception):
    """Gate 1 rejects."""


class WorkItem(NamedTuple):
    """A request to a worker. ``WorkItem(problem, None)`` asks for the problem's baselines only.

    Attributes:
        config: kernel to evaluate; None: only the problem's baselines.
        nvmmh: config that baseline ``nvmmh`` runs; None: it is left out. Consecutive items of one problem share the
            first one's.
        proved: True if another worker has proved this kernel in full. It is still proved on the timed operands.
        built: the compiled free kernel (:class:`outblas_lab.jail.build.BuiltKernel`), which a jailed worker cannot
            compile itself; else None.
        fallback: algorithm of cuBLASLt that ``outblas.matmul`` would run, to be timed as one more baseline,
            ``fallback``.
            Its form is that of :func:`outblas.runtime.cublas.describe`: ``id=66 tile=10 splitk=1 ...``. Empty:
            torch.matmul; None: nothing more is timed. Consecutive items of one problem share the first one's.
        second: algorithm of a second winner, in the same form, to be timed as baseline ``second_algorithm``. Empty:
            nothing more is timed. Consecutive items share it, too.
    """

    problem: Problem
    config: Candidate | None
    nvmmh: KernelConfig | None = None
    proved: bool = False
    built: Any = None
    fallback: str | None = None
    second: str = ""
