"""Free kernels on a real GPU: compiled here, run in jailed workers that live for one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines, Options
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas.runtime.nvrtc import usable_cores
from outblas.workers.handler import WorkItem
from outblas.workers.sandbox import HostLimits, Sandbox, WorkerLoss, factory_name
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.jailed_worker import JailedCell, import_ahead, make_handler
from outblas_lab.jail.scratch_folder import scratch_folder
from outblas_lab.jail.spare_worker import SpareWorker
from outblas_lab.jail.static_gate import examine

HANDLER_FACTORY, _PREPARE = factory_name(make_handler), factory_name(import_ahead)
_CODEC = __name__
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
            cudart = _cudart() if any(b.kernel.launch.form == "host" for b in batch) else None
            cell = JailedCell(folder, cudart, self._free.jailed)
            sandbox = Sandbox(
                self._factory, (self._options, cell), self._step_s, codec=_CODEC,
                limits=HostLimits(self._free.memory_bytes, folder, self._free.folder_bytes),
                batch_timeout_s=self._free.candidate_s * len(batch),
                spawn=None if self._spare is None else self._spare.take,
            )  # fmt: skip
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
            return failed(Status.RULE_BROKEN, "the worker answered a different question")
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


#: Letters of a detail and of a name, gates, baselines and samples at most; numbers stay below this.
_WORDS, _NAME, _GATES, _BASELINES, _SAMPLES, _LARGE = 600, 60, 16, 64, 100_000, 1e12


def encode(value: tuple[Evaluation | None, Baselines | None]) -> dict[str, Any]:
    """Return the answer of a worker's handler as JSON types.

    Returns:
        A new ``{"evaluation": ..., "baselines": {"timings": ..., "details": ..., "left_out": ...}}``. Both keys are
        always there; None stands for what is None.
    """
    evaluation, baselines = value
    return {
        "evaluation": None if evaluation is None else evaluation_to_json(evaluation),
        "baselines": None
        if baselines is None
        else {
            "timings": {name: dict(vars(timing)) for name, timing in baselines.timings.items()},
            "details": baselines.details,
            "left_out": baselines.left_out,
        },
    }


def decode(data: dict[str, Any]) -> tuple[Evaluation | None, Baselines | None]:
    """Return the pair that :func:`encode` was given, checked, because the worker is not trusted.

    Names and words are cut. The evaluation's ``counters`` are empty and its ``log`` is "", whatever the worker sent.
    Raises:
        ValueError: the data are no answer, or inconsistent: a time that is not positive, or a status that contradicts
            the verdict. KeyError, TypeError or OutblasError may be raised instead.
    """
    reported, given = data["evaluation"], data["baselines"]
    evaluation = None if reported is None else evaluation_from_json(reported)
    if evaluation is not None:
        evaluation = _checked(evaluation)
    if given is None:
        return evaluation, None
    timings = {
        _text(name, _NAME): _positive(Timing(**{**timing, "samples_us": tuple(timing["samples_us"])}))
        for name, timing in _few(given["timings"]).items()
    }
    return evaluation, Baselines(timings, _texts(given["details"]), _texts(given["left_out"]))


def _checked(reported: Evaluation) -> Evaluation:
    """An evaluation whose every field is of its kind, its words cut to what is kept."""
    timing = None if reported.timing is None else _positive(reported.timing)
    for us in reported.baselines_us.values():
        _number(us, "us", 0.0)
    baselines = {_text(name, _NAME): us for name, us in _few(reported.baselines_us).items()}
    if (speedup := reported.speedup) is not None:
        for ratio in (speedup.ratio, speedup.low, speedup.high):
            _number(ratio, "as a speed-up", 0.0)
        speedup = replace(speedup, baseline=_text(speedup.baseline, _NAME))
    verdict = reported.verdict
    if verdict is not None:
        if verdict.status is not reported.status:
            raise ValueError(f"{reported.status} with a verdict of {verdict.status}")
        gates = tuple(_text(gate, _NAME) for gate in verdict.gates[:_GATES])
        verdict = replace(verdict, gates=gates, detail=_text(verdict.detail, _WORDS), max_err_ratio=_ratio(verdict))
    elif reported.status is Status.PASSED:
        raise ValueError("passed without a verdict")
    # What the machine code says is known to who compiled it.
    return replace(
        reported, verdict=verdict, detail=_text(reported.detail, _WORDS), timing=timing, baselines_us=baselines,
        speedup=speedup, counters={}, log="",
    )  # fmt: skip


def _ratio(verdict: Verdict) -> float | None:
    """Return error divided by bound; None if it is no finite number."""
    ratio = verdict.max_err_ratio
    if ratio is None:
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or ratio < 0:
        raise ValueError("an error that is not a number of 0 or more")
    if verdict.status is Status.PASSED and not ratio <= 1.0:
        raise ValueError(f"passed with an error {ratio:.3g} times the bound")
    return float(ratio) if isinstance(ratio, float) and math.isfinite(ratio) or ratio < _LARGE else None


def _positive(timing: Timing) -> Timing:
    """A timing whose figures are such, its mode cut to what is kept."""
    if not timing.samples_us or len(timing.samples_us) > _SAMPLES:
        raise ValueError(f"{len(timing.samples_us)} samples")
    for us in (timing.median_us, *timing.samples_us):
        _number(us, "us", 0.0)
    _number(timing.spread, "as a spread", -1e-9)
    if any(type(count) is not int or not 1 <= count < _LARGE for count in (timing.repeats, timing.operand_sets)):
        raise ValueError("a timing with invalid counts")
    return replace(timing, mode=_text(timing.mode, _NAME))


def _number(found: object, what: str, above: float) -> None:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{str(found)[:40]!r} {what}")
    if not (abs(found) < _LARGE and found > above):
        raise ValueError(f"{found:.6g} {what}" if isinstance(found, float) else f"an out-of-range number {what}")


def _text(found: object, limit: int) -> str:
    if not isinstance(found, str):
        raise ValueError("a text that is not a string")
    return clean_text(found, limit)


def _texts(found: dict[str, Any]) -> dict[str, str]:
    return {_text(name, _NAME): _text(text, _WORDS) for name, text in _few(found).items()}


def _few(found: dict[str, Any]) -> dict[str, Any]:
    if len(found) > _BASELINES:
        raise ValueError(f"{len(found)} baselines")
    return found
