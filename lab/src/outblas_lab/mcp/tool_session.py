"""State of one session of the tool server: its evaluator, recording, budget, results and archive."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from outblas.core.config import Candidate, KernelConfig, config_name
from outblas.core.errors import ConfigError, DeviceError, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import RecordedEvaluations, load
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.llm.evaluators import COMPILE_ONLY, EvaluatorChoice, compiled_template, open_chosen_evaluator
from outblas_lab.mcp.kernel_folder import KernelFolder, SourcedEvaluation
from outblas_lab.mcp.session_budget import SessionBudget, SessionLimits
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import ReplayEvaluator


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session.

    Attributes:
        place: evaluator of free kernels, of :func:`outblas_lab.llm.evaluators.parse_evaluator`. A GPU also evaluates
            template kernels.
        recording: name or path of the recording that answers for template kernels without a GPU.
        folder: folder of the archive; None: the session has no archive.
    """

    place: EvaluatorChoice
    recording: str
    limits: SessionLimits = field(default_factory=SessionLimits)
    folder: Path | None = None


class ToolSession(AbstractContextManager["ToolSession"]):
    """The state that the tools share. Use it as a context manager; it opens parts at their first use.

    One thread at a time may call it.

    Raises:
        RecordError: the folder is no archive, cannot be read or written, or another process works in it.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.budget = SessionBudget(settings.limits)
        self._evaluations: dict[tuple[Problem, Candidate], SourcedEvaluation] = {}
        self._open = ExitStack()
        folder = settings.folder
        self._folder = None if folder is None else self._open.enter_context(KernelFolder(folder))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what the session has opened. A second call does nothing."""
        self._open.close()

    @property
    def gpu_index(self) -> int | None:
        """Return CUDA's index of the session's GPU; None without one."""
        return self.settings.place.gpu_index

    @cached_property
    def evaluator(self) -> Evaluator:
        """Return the evaluator of free kernels. It is opened at the first use and closed with the session."""
        return self._open.enter_context(open_chosen_evaluator(self.settings.place))

    @cached_property
    def _recorded(self) -> RecordedEvaluations | None:
        """The free kernels of the file that ``--device`` names; None if it names none."""
        place = self.settings.place
        return None if place.gpu_index is not None or place.name == COMPILE_ONLY else load(place.name)

    @cached_property
    def replay(self) -> ReplayEvaluator:
        """Return the evaluator that answers from the recording, which is read at the first use (seconds).

        Raises:
            UsageError: there is no such recording.
            RecordError: the recording is damaged.
            ModuleNotFoundError: pyarrow is not installed.
        """
        return ReplayEvaluator(Recording.load(self.settings.recording))

    @property
    def template_evaluator(self) -> Evaluator:
        """Return the evaluator of template kernels: the GPU's, else that of the recording."""
        return self.replay if self.gpu_index is None else self.evaluator

    @property
    def gpu(self) -> Gpu:
        """Return the GPU of the session's compilations and live figures."""
        return self.evaluator.gpu

    def fastest_recorded(self, problem: Problem) -> list[tuple[KernelConfig, float]]:
        """Return (config, microseconds) of the recording's proven kernels on a problem, fastest first.

        Raises:
            UsageError: the recording does not hold the problem.
        """
        recording = self.replay.recording
        times = recording.median_us[recording.row(problem)]  # NaN unless proven
        order = np.argsort(times, kind="stable")[: int(np.isfinite(times).sum())]
        return [(recording.catalogue[i], float(times[i])) for i in order]

    @property
    def folder(self) -> KernelFolder:
        """Return the archive's folder.

        Raises:
            UsageError: the session has none.
        """
        if self._folder is None:
            wrong, do = "this session has no archive", "ask the user to restart the server with --run"
            raise UsageError(wrong, "a server that was started with --run FOLDER", do)
        return self._folder

    def compiled(self, problem: Problem, candidate: Candidate, gpu: Gpu) -> Evaluation:
        """Return the evaluation of a candidate that is compiled and inspected, and not run. It costs a compilation.

        Raises:
            BudgetSpent: no compilation is left.
            ConfigError: the knobs make no kernel.
            ToolchainMissing: a compiler is not installed.
        """
        with self.budget.compilation():
            if isinstance(candidate, FreeKernel):
                (found,) = CompileOnlyEvaluator(gpu).evaluate([(problem, candidate)])
                return found
            assert isinstance(candidate, KernelConfig)
            _refuse_senseless(problem, candidate, gpu)
            return compiled_template(problem, candidate, gpu)

    def evaluated(self, problem: Problem, candidate: Candidate) -> SourcedEvaluation:
        """Return the evaluation of a candidate. The first one of a pair costs an evaluation, a repetition nothing.

        A GPU proves and times the candidate. Without one, a template kernel is answered from the recording, and a free
        kernel from a file of recorded free kernels.

        Raises:
            BudgetSpent: no evaluation or no second of the GPU is left.
            DeviceError: there is no GPU, and nothing was recorded.
            UsageError: the recording does not hold the pair.
            ConfigError: the knobs make no kernel.
        """
        pair = problem, candidate
        if pair not in self._evaluations:
            with self.budget.evaluation():
                self._evaluations[pair] = self._evaluate(problem, candidate)
        return self._evaluations[pair]

    def history(self, problem: Problem) -> list[Evaluation]:
        """Return the session's evaluations of template kernels on a problem, in their order."""
        return [
            found.evaluation
            for (one, candidate), found in self._evaluations.items()
            if one == problem and isinstance(candidate, KernelConfig)
        ]

    def _evaluate(self, problem: Problem, candidate: Candidate) -> SourcedEvaluation:
        if self.gpu_index is not None:
            if isinstance(candidate, KernelConfig):
                _refuse_senseless(problem, candidate, self.gpu)
            with self.budget.gpu_time():
                (found,) = self.evaluator.evaluate([(problem, candidate)])
            return SourcedEvaluation(found, self.gpu, self.evaluator.source)
        if isinstance(candidate, KernelConfig):
            (found,) = self.replay.evaluate([(problem, candidate)])
            return SourcedEvaluation(found, self.replay.gpu, self.replay.source)
        assert isinstance(candidate, FreeKernel)
        known = None if self._recorded is None else self._recorded.find(problem, candidate)
        if known is None:  # the evaluator would compile it, outside the budget
            wrong = f"{config_name(candidate)} was not run: this session has no GPU"
            do = "use the compile tool for compiler results; ask the user for a GPU to prove and time a free kernel"
            raise DeviceError(wrong, "a GPU, or a recorded kernel", do)
        return SourcedEvaluation(known, self.gpu, self.evaluator.source)


def _refuse_senseless(problem: Problem, config: KernelConfig, gpu: Gpu) -> None:
    """Raise ConfigError for knobs on which the legality predicate itself fails, such as a depth of 0."""
    from outblas.kernels.legality import why_illegal

    try:
        why_illegal(problem, config, gpu)
    except (ArithmeticError, RecursionError) as error:
        wrong = f"{config_name(config)[:200]} is not a valid kernel ({type(error).__name__})"
        raise ConfigError(wrong, "knobs of a kernel family", "see resource outblas://guide") from error
