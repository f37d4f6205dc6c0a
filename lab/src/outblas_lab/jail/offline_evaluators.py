"""Evaluators of free kernels without a GPU: recorded answers, or the compiler's verdict alone.

With a GPU, :class:`outblas.tune.live_evaluator.LiveEvaluator` is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outblas.core.config import Candidate
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import RecordedEvaluations, load

#: Detail of a kernel that compiles and passes gate 1 where nothing can run it.
NOT_RUN = "compiled; not run"


class CompileOnlyEvaluator(Evaluator):
    """An evaluator that compiles, applies the static gate and runs nothing. It needs no GPU.

    A kernel that passes has the status LEFT_OUT and the detail ``compiled; not run``. ``source`` is such as
    ``compile:h200``.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @property
    def gpu(self) -> Gpu:
        return self._gpu

    @property
    def source(self) -> str:
        return f"compile:{self._gpu.name}"

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """Yield one evaluation per pair, in order. Each is compiled when the caller takes its result.

        A kernel that fails has the status ILLEGAL, STATIC_REJECTED or COMPILE_ERROR, without an error.

        Raises:
            ToolchainMissing: a compiler or CUTLASS is not installed.
            UsageError: a candidate is a config of a kernel family, not a free kernel.
        """
        from outblas_lab.jail.static_gate import examine

        for problem, kernel in pairs:
            done = examine(problem, _free(kernel), self._gpu)
            if isinstance(done, Evaluation):
                yield done
                continue
            verdict, left_out = Verdict(Status.LEFT_OUT, ("static",), NOT_RUN), Status.LEFT_OUT
            yield Evaluation(problem, kernel, left_out, NOT_RUN, verdict, counters=done.counters(), log=done.log)


class RecordedFreeEvaluator(Evaluator):
    """An evaluator that returns recorded answers, and treats other pairs as :class:`CompileOnlyEvaluator` does.

    The constructor reads the file. ``source`` is ``recorded:<file name>``, such as ``recorded:r.jsonl``; ``gpu`` is the
    recording's. ``provenance`` is that of its header.

    Raises:
        RecordError: the file is missing, damaged or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._recorded: RecordedEvaluations = load(self._path)
        self._other = CompileOnlyEvaluator(self._recorded.gpu)

    @property
    def gpu(self) -> Gpu:
        return self._recorded.gpu

    @property
    def source(self) -> str:
        return f"recorded:{self._path.name}"

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the recorded run, from the file's header."""
        return dict(self._recorded.provenance)

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """Yield one evaluation per pair, in order: the recorded one, else a compiled one (LEFT_OUT if it passes).

        If a pair was recorded twice, the last evaluation counts.

        Raises:
            ToolchainMissing: a pair was not recorded, and the compiler is not installed.
            UsageError: a candidate is a config of a kernel family, not a free kernel.
        """
        for problem, kernel in pairs:
            found = self._recorded.find(problem, _free(kernel))
            if found is not None:
                yield found
            else:
                yield from self._other.evaluate([(problem, kernel)])

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Return the baselines of the problem's last recorded evaluation that has some, name -> microseconds.

        Empty if none has. Example: ``{"lt_auto": 4.0}``.
        """
        timed = [e for e in self._recorded.of(problem) if e.baselines_us]
        return dict(timed[-1].baselines_us) if timed else {}


def _free(candidate: Candidate) -> FreeKernel:
    from outblas.core.errors import UsageError

    if not isinstance(candidate, FreeKernel):
        raise UsageError(f"a {candidate.family} kernel was passed", "a free kernel", "use a replay or a live evaluator")
    return candidate
