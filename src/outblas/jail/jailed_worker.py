"""The jailed worker of free kernels: the handler of outblas.workers.handler, with a proof and checks of their own.

It compiles nothing, for its jail starts no program: kernels come built. It lives for one batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from outblas.core.errors import OutblasError, UsageError
from outblas.core.evaluation import GateFailed, Status, Timing, Verdict
from outblas.core.plausibility import least_us, why_too_fast
from outblas.core.problem import Problem
from outblas.core.rivals import Bindable
from outblas.jail import conduct
from outblas.jail.build import BuiltKernel
from outblas.jail.confinement import Jail, scrub_environment
from outblas.jail.free_launch import load
from outblas.jail.free_proof_shapes import free_proof_shapes
from outblas.jail.host_launches import check_launches
from outblas.jail.judged_clock import JudgedClock, JudgedEntry
from outblas.judge.bench_cell import Baselines, BenchCell, Options
from outblas.judge.rounds import Prune
from outblas.kernels.custom.free_kernel import FreeKernel
from outblas.workers.handler import Handler, ProvenCandidate
from outblas.workers.sandbox import Emit
from outblas.workers.work_item import WorkItem


@dataclass(frozen=True)
class JailedCell:
    """The place where a worker is confined.

    Attributes:
        cudart: path of the CUDA run-time library of host-form kernels; None: none is expected.
        jailed: False in tests only.
    """

    folder: str
    cudart: str | None = None
    jailed: bool = True


def import_ahead() -> None:
    """Prepare a worker that waits for its turn: scrub its environment, then import torch, which takes seconds.

    This module has imported the judge. CUDA stays untouched, because another worker may be timing on the GPU.
    """
    scrub_environment()
    import torch  # noqa: F401


def start_libraries(gpu_index: int, entries: Iterable[Bindable]) -> None:
    """Start CUDA, torch and the libraries of some entries on a GPU, for a process that is confined afterwards.

    An entry that fails is ignored.

    Args:
        entries: baselines that later calls need.
    """
    import torch

    from outblas.judge.gates import reference_blas

    torch.cuda.set_device(gpu_index)
    x, y, z = (torch.ones((16, 16), dtype=torch.float16, device=f"cuda:{gpu_index}") for _ in range(3))
    stream = int(torch.cuda.current_stream(gpu_index).cuda_stream)
    for entry in (reference_blas(gpu_index), *entries):
        with contextlib.suppress(OutblasError):  # one that cannot is left out where it is asked for, with the reason
            entry.bind(Problem(16, 16, 16), x, y, z)(stream)
    torch.cuda.synchronize(gpu_index)


def make_handler(
    options: Options, cell: JailedCell, handler_of: Callable[[Options, JailedCell], FreeHandler] | None = None
) -> FreeHandler:
    """Return the handler of a jailed worker. With ``cell.jailed`` this process is confined, for good, when it returns.

    CUDA and torch are started before the files are confined, so that a GPU is needed.

    Args:
        options: GPU, proof and timing.
        handler_of: makes the handler; None: :class:`FreeHandler`.
    """
    jail = Jail(cell.folder, tuple(os.path.dirname(path) for path in (cell.cudart,) if path))
    if cell.jailed:
        _no_words()
        jail.environment()
    handler = (handler_of or FreeHandler)(options, cell)
    handler.warm()  # CUDA does not start behind landlock on every machine (error 304)
    if cell.jailed:
        jail.files()
        jail.calls()
    return handler


class FreeHandler(Handler):
    """The handler for items whose configs are free kernels and whose ``built`` has the compiled kernel.

    It is called as :class:`outblas.workers.handler.Handler`. An item with another config gets the status ILLEGAL.

    Args:
        options: GPU, proof and timing.
    """

    def __init__(self, options: Options, cell: JailedCell) -> None:
        super().__init__(options)
        self._cell = cell
        self._before: dict[str, dict[str, object]] = {}

    def warm(self) -> None:
        """Start CUDA, torch and the baselines' libraries, so that later calls need only memory and the GPU from the
        system.

        A baseline that fails is ignored.
        """
        ready = [entry for name, entry in self._baselines.items() if name not in ("lt_auto", "nvmmh")]
        start_libraries(self._options.gpu_index, ready)

    def _why_illegal(self, problem: Any, config: Any) -> str | None:
        if not isinstance(config, FreeKernel):
            return "a worker of free kernels takes no others"
        return config.launch.why_not(problem, self._options.gpu)

    def _kernel_of(self, item: WorkItem) -> tuple[Any, dict[str, float]]:
        assert item.built is not None
        built: BuiltKernel = item.built
        name = built.kernel.name
        self._before[name] = conduct.snapshot() if built.kernel.launch.form == "host" else {}
        kernel = load(built, self._cell.folder, self._cell.cudart, self._options.gpu)
        return kernel, built.counters()

    def _prove(
        self, bench_cell: BenchCell, kernel: Bindable, config: Any, proved: bool, emit: Emit, index: int
    ) -> Verdict:
        """In full on the problem, or a small sister, and all its neighbours."""
        from outblas.judge.gates import prove
        from outblas.judge.trials import ProofTrials

        worst, gates = 0.0, tuple[str, ...]()
        if self._options.level == "full" and not proved:
            allowed = free_proof_shapes(bench_cell.problem, config.launch, self._options.gpu)
            for small in allowed or [bench_cell.problem]:
                emit.begin(index)  # a sign of life: each proof has the time limit to itself
                verdict = self._guarded(
                    kernel, prove(kernel, small, None, "full", self._options.gpu_index, trials=ProofTrials.secret())
                )
                if verdict.status is not Status.PASSED:
                    return replace(verdict, detail=f"on {small.mnk}: {verdict.detail}")
                worst, gates = max(worst, verdict.max_err_ratio or 0.0), verdict.gates
            emit.begin(index)
        if config.launch.form == "host":
            call = kernel.bind(bench_cell.problem, *bench_cell.bench.operands(0))
            call(bench_cell.bench.stream)
            try:
                check_launches(call, bench_cell.bench.stream)
            except GateFailed as failure:
                return Verdict(failure.status, gates, failure.detail)
        return self._guarded(kernel, Verdict(Status.PASSED, gates or ("static",), "", worst))

    def _guarded(self, kernel: Any, verdict: Verdict) -> Verdict:
        """A verdict, unless the workspace's guards or the process say otherwise."""
        if verdict.status is not Status.PASSED:
            return verdict
        if kernel.broken_workspace():
            return Verdict(Status.MEMORY_VIOLATION, ("static",), "the canary around the workspace was overwritten")
        kernel.release()
        offence = conduct.what_changed(self._before[kernel.name]) if self._before.get(kernel.name) else ""
        return Verdict(Status.RULE_BROKEN, verdict.gates, offence) if offence else verdict

    def _ready(self, bench_cell: BenchCell, kernel: Any) -> JudgedEntry:
        return JudgedEntry(kernel)

    def _measure(self, bench_cell: BenchCell, graphs: dict[str, Any], prune: Prune) -> dict[str, Timing]:
        """In replays that are judged one by one."""
        from outblas.jail.fresh_operands import FreshOperands

        if self._options.mode != "offline":
            raise UsageError(
                f"a free kernel in mode {self._options.mode}",
                "mode offline, in which each replay is judged",
                "change it",
            )
        bench, options = bench_cell.bench, self._options
        operands = FreshOperands(bench.problem, bench.repeats, f"cuda:{bench.gpu_index}")
        rounds = max(bench_cell.usual_rounds(options), options.near_rounds)
        return JudgedClock(bench, operands).measure(bench_cell.entries, graphs, options, rounds, prune)

    def _again(
        self, bench_cell: BenchCell, candidate: ProvenCandidate, timing: Timing, baselines: Baselines
    ) -> Verdict:
        """Judge by its replays, then by its time against the least plausible one."""
        entry = candidate.graph
        if entry.failure is not None:
            return cast(Verdict, entry.failure)
        new = Verdict(Status.PASSED, ("fresh",), "", entry.max_err_ratio)
        held = self._guarded(entry.kernel, new)
        if held.status is not Status.PASSED:
            return held
        known = {name: t.median_us for name, t in baselines.timings.items()}
        least = least_us(bench_cell.problem, self._options.gpu)
        if suspicion := why_too_fast(timing.median_us, known, least):
            return Verdict(Status.RULE_BROKEN, (), suspicion)
        return replace(new, detail=f"within error of the floor of {least:.3f} us" if timing.median_us < least else "")


def _no_words() -> None:
    """Redirect the candidate's stdout and stderr to /dev/null: untrusted output may contain terminal escapes."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.close(null)
