"""Free kernels on a real GPU: compiled here, run in jailed workers that live for one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines, Options
from outblas.runtime.nvrtc import usable_cores
from outblas.workers.host_limits import HostLimits
from outblas.workers.sandbox import Sandbox, WorkerLoss, factory_name
from outblas.workers.work_item import WorkItem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import answers
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.jailed_worker import JailedCell, import_ahead, make_handler
from outblas_lab.jail.scratch_folder import scratch_folder
from outblas_lab.jail.spare_worker import SpareWorker
from outblas_lab.jail.static_gate import examine

HANDLER_FACTORY, _PREPARE = factory_name(make_handler), factory_name(import_ahead)
_CODEC = answers.__name__
#: Letters of a worker's detail that are kept.
_DETAIL = 600


@dataclass(frozen=True)
class FreeOptions:
    """Limits that keep free kernels apart. Example: ``FreeOptions(batch=1)``.

    Attributes:
        batch: number of kernels of form ``device`` that share a worker. A kernel of form ``host`` is alone, because its
            code could see others.
        memory_bytes: host memory of a worker, in bytes (48 GiB).
        folder_bytes: disk that a worker fills in its folder, in bytes (4 GiB).
        candidate_s: seconds for one candidate of a batch, however often the worker reports.
        jailed: False in tests only.
        prepare: ``module:function`` that a worker calls before its turn, while another judges. None: no worker is
            started ahead, which suits a single kernel.
        compilers: compilers that run at once; None: one per usable core.
    """

    batch: int = 8
    memory_bytes: int = 48 << 30
    folder_bytes: int = 4 << 30
    candidate_s: float = 240.0
    jailed: bool = True
    prepare: str | None = _PREPARE
    compilers: int | None = None

    def evaluator(self, options: Options, step_timeout_s: float) -> JailedEvaluator:
        """Return a new evaluator with these limits."""
        return JailedEvaluator(options, step_timeout_s, self)


class JailedEvaluator:
    """Evaluate free kernels on one GPU, in jailed workers that live for one batch.

    While a worker judges, the next one starts: it imports its modules and waits, and uses the GPU only after the first
    has ended. The constructor starts nothing; a worker starts in :meth:`evaluate`. Call :meth:`close` at the end.

    Args:
        options: settings of the workers. Baseline ``nvmmh`` and the file of algorithms are left out.
        step_timeout_s: seconds without a word that count as a hang.
        free: limits; None: the defaults of :class:`FreeOptions`.
        factory: ``module:function`` that makes the worker's handler from (options, cell); tests pass another.
    """

    def __init__(
        self, options: Options, step_timeout_s: float, free: FreeOptions | None = None, factory: str = HANDLER_FACTORY
    ) -> None:
        # nvmmh is one of our own kernels, compiled where it is timed: not in a jail.
        kept = tuple(name for name in options.baselines if name != "nvmmh")
        # And no file of the search lies open where they run.
        self._options = replace(options, baselines=kept, algorithms=None)
        self._step_s, self._factory = step_timeout_s, factory
        self._free = free or FreeOptions()
        self._spare = None if self._free.prepare is None else SpareWorker(self._free.prepare, _CODEC)

    def close(self) -> None:
        """End the worker that was started ahead. A second call does nothing."""
        if self._spare is not None:
            self._spare.close()

    def evaluate(self, problem: Problem, kernels: Sequence[Any]) -> Iterator[tuple[Evaluation, Baselines | None]]:
        """Compile all kernels, then run those that pass the static gate; yield one answer per kernel.

        It is a generator: nothing happens before the first answer is taken. Kernels that fail before they run come
        first, in their order. Their baselines are None. A kernel that fails raises no error; its evaluation has the
        status, such as ``COMPILE_ERROR``.

        Args:
            problem: the product to compute.
            kernels: free kernels.

        Yields:
            (evaluation, baselines of the same rounds or None).

        Raises:
            DeviceError: a worker cannot start.
            ToolchainMissing: a compiler or CUTLASS is missing.
        """
        self._start_next()  # its imports run beside the compilers
        built: list[BuiltKernel] = []
        for found in self._examined(problem, kernels):
            if isinstance(found, Evaluation):
                yield found, None
            else:
                built.append(found)
        for batch in self._batches(built):
            yield from self._run(problem, batch)

    def may_falsify(self, kernel: Any) -> bool:
        """Return whether a kernel runs in its judge's process: one of form ``host`` does."""
        return bool(kernel.launch.form == "host")

    def _examined(self, problem: Problem, kernels: Sequence[FreeKernel]) -> Iterator[BuiltKernel | Evaluation]:
        """Compiled on all cores; each compiler is a process of its own."""
        with ThreadPoolExecutor(min(len(kernels), self._free.compilers or usable_cores()) or 1) as pool:
            yield from pool.map(lambda kernel: examine(problem, kernel, self._options.gpu), kernels)

    def _batches(self, built: Sequence[BuiltKernel]) -> Iterator[list[BuiltKernel]]:
        apart = [each for each in built if each.kernel.launch.form == "host"]
        together = [each for each in built if each.kernel.launch.form != "host"]
        for start in range(0, len(together), self._free.batch):
            yield together[start : start + self._free.batch]
        for each in apart:
            yield [each]

    def _run(self, problem: Problem, batch: Sequence[BuiltKernel]) -> Iterator[tuple[Evaluation, Baselines | None]]:
        items = [WorkItem(problem, each.kernel, None, False, each) for each in batch]
        with scratch_folder("outblas-free-") as folder:
            cell = JailedCell(folder, _cudart() if any(b.kernel.launch.form == "host" for b in batch) else None)
            if not self._free.jailed:
                cell = JailedCell(cell.folder, cell.cudart, False)
            sandbox = Sandbox(
                self._factory,
                (self._options, cell),
                self._step_s,
                codec=_CODEC,
                limits=HostLimits(self._free.memory_bytes, folder, self._free.folder_bytes),
                batch_timeout_s=self._free.candidate_s * len(batch),
                spawn=None if self._spare is None else self._spare.take,
            )
            with sandbox:
                for index, value in sandbox.run(items, self._start_next):
                    yield self._taken(problem, batch[index], value)

    def _start_next(self) -> None:
        if self._spare is not None:
            self._spare.start()

    def _taken(self, problem: Problem, built: BuiltKernel, value: Any) -> tuple[Evaluation, Baselines | None]:
        """Check the worker's answer against the request. Facts that are known without a run come from this process."""
        kernel, counters = built.kernel, built.counters()

        def failed(status: Status, detail: str) -> tuple[Evaluation, None]:
            verdict = Verdict(status, (), detail)
            return Evaluation(problem, kernel, status, detail, verdict, counters=counters, log=detail), None

        if isinstance(value, WorkerLoss):
            return failed(value.status, value.detail)
        evaluation, baselines = value
        if evaluation is None or evaluation.problem != problem or evaluation.config != kernel:
            return failed(Status.RULE_BROKEN, "the worker answered what it was not asked")
        detail = evaluation.detail[:_DETAIL]
        log = built.log if evaluation.timing is not None else f"{evaluation.status}: {detail}"
        return replace(evaluation, config=kernel, detail=detail, counters=counters, log=log), baselines


def _cudart() -> str | None:
    from outblas_lab.jail.toolchain import find_nvcc

    try:
        found = find_nvcc()
    except ToolchainMissing:
        return None
    return str(found.library_folder / found.cudart)
