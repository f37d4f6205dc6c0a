"""Evaluators of an evolution: a GPU or several, a recording of free kernels, or the compiler alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.config import Candidate, KernelConfig
from outblas.core.errors import CompileError, DeviceError, UsageError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import load
from outblas_lab.jail.offline_evaluators import NOT_RUN, CompileOnlyEvaluator, RecordedFreeEvaluator

if TYPE_CHECKING:
    from outblas.tune.judged_workers import Workers

COMPILE_ONLY = "compile"


@dataclass(frozen=True)
class EvaluatorChoice:
    """An evaluator as the command line names it. ``str()`` of it is its name.

    Attributes:
        name: ``cuda:N``, ``cuda`` for several GPUs, ``compile`` or the path of a file.
        gpu_index: N of ``cuda:N``; else None.
    """

    name: str
    gpu_index: int | None = None
    workers: Workers | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def runs_kernels(self) -> bool:
        """Return True if kernels run on a GPU."""
        return self.gpu_index is not None or self.workers is not None


def choose_workers(plan: Workers) -> EvaluatorChoice:
    """Return the evaluator of several workers. Its name is ``cuda``, so a run may resume on other GPUs.

    Raises:
        DeviceError: the workers would replay a recording, as they do on a machine without a GPU.
    """
    if plan.device.recording is not None:
        wrong, do = f"{plan} cannot run kernels", "pass --workers ray, or omit --workers; --device compile needs no GPU"
        raise DeviceError(wrong, "workers with CUDA GPUs", do)
    return EvaluatorChoice(str(plan), None, plan)


def parse_evaluator(text: str | None) -> EvaluatorChoice:
    """Return the evaluator that ``--device`` names. It is not opened, and a file is not read.

    Args:
        text: ``cuda:N``, ``cuda:N,M`` for several GPUs, ``compile`` or the path of a recording. None: ``cuda:0``, or
            ``compile`` on a machine without a GPU.

    Raises:
        UsageError: the text is none of these, the file does not exist, or a GPU is named twice.
        DeviceError: the GPU does not exist.
    """
    from outblas.runtime.device import gpu_count, require_gpus

    if text is None:
        text = "cuda:0" if gpu_count() else COMPILE_ONLY
    if match := re.fullmatch(r"cuda:(\d{1,3}(?:,\d{1,3})*)", text):
        indices = require_gpus(tuple(map(int, match[1].split(","))))
        if len(indices) == 1:
            return EvaluatorChoice(text, indices[0])
        from outblas_lab.pool.worker_plan import make_plan

        return choose_workers(make_plan("local", gpus=indices))
    if text == COMPILE_ONLY or Path(text).is_file():
        return EvaluatorChoice(text)
    raise UsageError(f"--device {text!r} is invalid", "cuda:N, cuda:N,M, compile, or a file of recorded free kernels",
                     "pass one of them")  # fmt: skip


@contextmanager
def open_chosen_evaluator(place: EvaluatorChoice) -> Iterator[Evaluator]:
    """Open the evaluator of a place; it is closed at the end of the context.

    Yields:
        A ``LiveEvaluator`` for ``cuda:N``, a ``PoolEvaluator`` for several GPUs, else a :class:`WithTemplates`. Target
        of ``compile`` is the architecture of the reference GPU.

    Raises:
        RecordError: the file is no recording of free kernels.
        DeviceError: a GPU cannot be used, or no Ray cluster answers.
        UsageError: the workers' GPUs are of two kinds.
        ToolchainMissing: a package that the evaluator needs is not installed.
    """
    if place.workers is not None:
        with place.workers.open() as pool:
            yield pool
    elif place.gpu_index is not None:
        from outblas.tune.live_evaluator import LiveEvaluator
        from outblas_lab.jail.jailed_evaluator import FreeOptions

        with LiveEvaluator(place.gpu_index, free=FreeOptions()) as live:
            yield live
    elif place.name == COMPILE_ONLY:
        yield WithTemplates(CompileOnlyEvaluator(reference_gpu()), ())
    else:
        path = Path(place.name)
        yield WithTemplates(RecordedFreeEvaluator(path), load(path).evaluations)


class WithTemplates(Evaluator):
    """An evaluator of free kernels that also answers for kernels of the template families.

    Free kernels are passed on to the inner evaluator. A template kernel is answered from the recording, if it was
    recorded for an equal problem. Else :func:`compiled_template` answers: the kernel is compiled, its machine code is
    inspected, and it is not run.

    Its ``gpu``, ``source`` and ``baselines(problem)`` are those of the inner evaluator.

    Args:
        recorded: recorded evaluations; those of free kernels are ignored.
    """

    def __init__(self, inner: Evaluator, recorded: Iterable[Evaluation]) -> None:
        self._inner = inner
        self._recorded = {(e.problem, e.config): e for e in recorded if not isinstance(e.config, FreeKernel)}

    @property
    def gpu(self) -> Gpu:
        return self._inner.gpu

    @property
    def source(self) -> str:
        return self._inner.source

    @property
    def provenance(self) -> dict[str, Any]:
        """Copy of the inner evaluator's provenance, which a recording has; empty for any other evaluator."""
        return dict(getattr(self._inner, "provenance", {}))

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """Yield one evaluation per pair, in order. Each pair is evaluated when the caller takes its result.

        Raises:
            ToolchainMissing: a pair was not recorded, and a compiler is not installed.
        """
        for problem, candidate in pairs:
            if not isinstance(candidate, KernelConfig):
                yield from self._inner.evaluate([(problem, candidate)])
            else:
                known = self._recorded.get((problem, candidate))
                yield compiled_template(problem, candidate, self.gpu) if known is None else known

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return self._inner.baselines(problem)


def compiled_template(problem: Problem, config: KernelConfig, gpu: Gpu) -> Evaluation:
    """Return an evaluation of a template kernel from its compilation and machine code, without a run.

    The status is ``LEFT_OUT`` with the detail ``compiled; not run`` if it passes. It is then not timed, but has
    counters such as ``registers``, ``spill_bytes`` and ``hgmma``. A failure is ``ILLEGAL``, ``COMPILE_ERROR`` or
    ``STATIC_REJECTED``, with its reason as the detail and without counters.

    Raises:
        ToolchainMissing: NVRTC is not installed.
    """
    from outblas.kernels.legality import why_illegal
    from outblas.kernels.source import make_source
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    def failed(status: Status, why: str) -> Evaluation:
        return Evaluation(problem, config, status, why, Verdict(status, (), why))

    reason = why_illegal(problem, config, gpu)
    if reason is not None:
        return failed(Status.ILLEGAL, reason)
    source = make_source(problem, config)
    try:
        cubin = compile_source(source, architecture(gpu))
    except CompileError as error:
        return failed(Status.COMPILE_ERROR, error.wrong)
    reason = check_static(cubin.facts, source, cubin)
    if reason is not None:
        return failed(Status.STATIC_REJECTED, reason)
    facts = {name: float(getattr(cubin.facts, name)) for name in ("hgmma", "hmma", "ldl", "stl", "utmaldg")}
    counters = {"registers": cubin.registers, "spill_bytes": cubin.spill_bytes, "stack_bytes": cubin.stack_bytes,
                "static_shared": cubin.static_smem, **facts}  # fmt: skip
    verdict = Verdict(Status.LEFT_OUT, ("static",), NOT_RUN)
    return Evaluation(problem, config, Status.LEFT_OUT, NOT_RUN, verdict, counters=counters)
