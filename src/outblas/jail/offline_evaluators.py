"""Who answers for free kernels where there is no GPU: what was recorded on one, and what the compiler says.

With a GPU :class:`outblas.bench.live_evaluator.LiveEvaluator` does. All keep the contract of outblas.core.evaluator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outblas.core.config import Candidate
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas.core.roofline import H200, Gpu
from outblas.jail.evaluation_file import RecordedEvaluations, Recorder, load
from outblas.kernels.custom.free_kernel import FreeKernel

if TYPE_CHECKING:
    from outblas.jail.build import BuiltKernel

#: Detail of a kernel that compiles and passes gate 1 where nothing can run it.
NOT_RUN = "compiled; not run"


class FreeEvaluator(Protocol):
    """Whoever answers for free kernels."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that is compiled for, and that figures are of."""

    @property
    def source(self) -> str:
        """Where the answers come from: ``cuda:0``, ``compile:h200``, ``recorded:<file>``."""

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterable[Evaluation]:
        """One evaluation per pair, in any order; a bad candidate is a failing status."""

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Name -> microseconds per call of the baselines of a problem; empty where none was timed."""


class CompileOnlyEvaluator:
    """Compiles and looks at the machine code, and runs nothing: a kernel that passes is LEFT_OUT, :data:`NOT_RUN`."""

    def __init__(self, gpu: Gpu = H200) -> None:
        self._gpu = gpu

    @property
    def gpu(self) -> Gpu:
        return self._gpu

    @property
    def source(self) -> str:
        return f"compile:{self._gpu.name}"

    def candidates(self, problem: Problem) -> Sequence[FreeKernel]:
        """None: free kernels are written, not offered."""
        return ()

    def expect(self, problems: Iterable[Problem]) -> None:
        return None

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """One evaluation per pair, in order.

        Raises:
            ToolchainMissing: a compiler or CUTLASS is not installed.
        """
        from outblas.jail.static_gate import examine

        for problem, kernel in pairs:
            done = examine(problem, _free(kernel), self._gpu)
            yield done if isinstance(done, Evaluation) else compile_only_evaluation(problem, _free(kernel), done)

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return {}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return ""

    def close(self) -> None:
        return None


class RecordedFreeEvaluator:
    """Answers what a GPU has answered before (outblas.jail.evaluation_file), and the rest as
    :class:`CompileOnlyEvaluator` does.

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
        """What the file's head says of the run that it was recorded in."""
        return dict(self._recorded.provenance)

    def candidates(self, problem: Problem) -> Sequence[FreeKernel]:
        """Kernels recorded on the problem, in the file's order."""
        return [e.config for e in self._recorded.of(problem) if isinstance(e.config, FreeKernel)]

    def expect(self, problems: Iterable[Problem]) -> None:
        return None

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """One evaluation per pair, in order: the recorded one (of a pair recorded twice, the last), else compiled.

        Raises:
            ToolchainMissing: one was not recorded, and the compiler is not installed.
        """
        for problem, kernel in pairs:
            found = self._recorded.find(problem, _free(kernel))
            if found is not None:
                yield found
            else:
                yield from self._other.evaluate([(problem, kernel)])

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """As measured with the last evaluation that was recorded on the problem; empty where there is none."""
        timed = [e for e in self._recorded.of(problem) if e.baselines_us]
        return dict(timed[-1].baselines_us) if timed else {}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return ""

    def close(self) -> None:
        return None


class _Recording:
    """An evaluator whose answers are written down as they come."""

    def __init__(self, inner: FreeEvaluator, file: Recorder) -> None:
        self._inner, self._file = inner, file

    @property
    def gpu(self) -> Gpu:
        return self._inner.gpu

    @property
    def source(self) -> str:
        return self._inner.source

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        for evaluation in self._inner.evaluate(pairs):
            if isinstance(evaluation.config, FreeKernel) and evaluation.status is not Status.LEFT_OUT:
                self._file.append(evaluation)
            yield evaluation

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return self._inner.baselines(problem)


@contextlib.contextmanager
def recording_evaluator(inner: FreeEvaluator, path: str | Path, provenance: dict[str, Any]) -> Iterator[FreeEvaluator]:
    """``inner``, whose answers on free kernels are appended to a file for :class:`RecordedFreeEvaluator`, each before
    it is handed on. What was not run (LEFT_OUT) is not written.

    Args:
        provenance: of :func:`outblas.records.provenance.collect_provenance`, for the head of a new file.

    Raises:
        RecordError: the file is another's, or cannot be written; what it holds is whole.
    """
    with Recorder(path, inner.gpu, provenance) as file:
        yield _Recording(inner, file)


def compile_only_evaluation(problem: Problem, kernel: FreeKernel, built: BuiltKernel) -> Evaluation:
    """The answer on a kernel that compiles, and that nobody has run."""
    verdict = Verdict(Status.LEFT_OUT, ("static",), NOT_RUN)
    return Evaluation(problem, kernel, Status.LEFT_OUT, NOT_RUN, verdict, counters=built.counters(), log=built.log)


def _free(candidate: Candidate) -> FreeKernel:
    from outblas.core.errors import UsageError

    if not isinstance(candidate, FreeKernel):
        raise UsageError(f"a {candidate.family}", "a free kernel", "ask a replay or a live evaluator")
    return candidate
