"""Who answers for the candidates of a training: ``compile``, ``cuda:0`` or a file of recorded free kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from outblas.config import Candidate, KernelConfig
from outblas.errors import CompileError, UsageError
from outblas.evaluation import Evaluation, Status, Verdict
from outblas.free.evaluators import NOT_RUN, CompileOnly, RecordedFree
from outblas.free.kernel import FreeKernel
from outblas.problem import Problem
from outblas.roofline import H200, Gpu
from outblas.train_llm.judge import Judging

COMPILE = "compile"


class CompileAll:
    """Compiles template candidates and free kernels, and runs nothing; what passes gate 1 is LEFT_OUT, ``NOT_RUN``.

    Args:
        free: who answers for free kernels. jobs: compilers side by side; None: one per core.
    """

    def __init__(self, free: CompileOnly | RecordedFree, jobs: int | None = None) -> None:
        self._free, self._jobs = free, jobs

    @property
    def gpu(self) -> Gpu:
        return self._free.gpu

    @property
    def source(self) -> str:
        return self._free.source

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """One evaluation per pair, in any order.

        Raises:
            ToolchainMissing: no compiler is installed.
        """
        templates: list[tuple[Problem, KernelConfig]] = []
        free: list[tuple[Problem, FreeKernel]] = []
        for problem, candidate in pairs:
            if isinstance(candidate, FreeKernel):
                free.append((problem, candidate))
            else:
                templates.append((problem, candidate))
        yield from chain(self._templates(templates), self._free.evaluate(free) if free else ())

    def _templates(self, pairs: list[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
        from outblas.compile import compile_many
        from outblas.sass import check_static
        from outblas.source import make_source
        from outblas.space import why_illegal
        from outblas.worker import architecture

        legal = []
        for problem, config in pairs:
            reason = why_illegal(problem, config, self.gpu)
            if reason is None:
                legal.append((problem, config, make_source(problem, config)))
            else:
                yield _answer(problem, config, Status.ILLEGAL, reason)
        # Two at once would each start processes, which cost more than a few compilations.
        jobs = 1 if self._jobs is None and len(legal) < 8 else self._jobs
        for index, result in compile_many([source for *_, source in legal], architecture(self.gpu), jobs):
            problem, config, source = legal[index]
            if isinstance(result, CompileError):
                yield _answer(problem, config, Status.COMPILE_ERROR, str(result))
                continue
            rejected = check_static(result.facts, source, result)
            if rejected is not None:
                yield _answer(problem, config, Status.STATIC_REJECTED, rejected)
                continue
            counters = {"registers": float(result.registers), "compile_seconds": result.compile_seconds}
            verdict = Verdict(Status.LEFT_OUT, ("static",), NOT_RUN)
            yield Evaluation(problem, config, Status.LEFT_OUT, NOT_RUN, verdict, counters=counters)


@contextmanager
def evaluator_of(device: str, proof: str = "full") -> Iterator[Judging]:
    """The evaluator that ``--device`` names, closed at the end.

    Args:
        device: ``compile``, ``cuda:<index>``, or the path of a recording of free kernels.
        proof: ``full`` or ``cell``, see :class:`outblas.worker.Options`; on a GPU only.

    Raises:
        UsageError: none of them. DeviceError: no such GPU. RecordError: the file is none.
    """
    match = re.fullmatch(r"cuda:(\d+)", device)
    if device == COMPILE:
        yield CompileAll(CompileOnly(H200))
    elif match is not None:
        with _live(int(match[1]), proof) as live:
            yield live
    elif Path(device).is_file():
        yield CompileAll(RecordedFree(device))
    else:
        raise UsageError(f"--device {device!r}", "compile, cuda:0 or a file of recorded kernels", "pass one of them")


@contextmanager
def _live(index: int, proof: str) -> Iterator[Judging]:
    """A GPU behind the sandbox, started: its first candidate must not pay for imports and a CUDA context."""
    from outblas.baselines import RIVALS
    from outblas.evaluate import LiveEvaluator, Options
    from outblas.space import gpu_of_device

    if proof not in ("full", "cell"):
        raise UsageError(f"--proof {proof!r}", "full or cell", "pass one of them")
    options = Options(index, gpu_of_device(index), level=proof, baselines=RIVALS)  # type: ignore[arg-type]
    with LiveEvaluator(index, options) as evaluator:
        evaluator.start()
        yield evaluator


def _answer(problem: Problem, config: KernelConfig, status: Status, detail: str) -> Evaluation:
    return Evaluation(problem, config, status, detail, Verdict(status, (), detail))
