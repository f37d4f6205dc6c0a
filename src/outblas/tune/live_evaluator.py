"""Evaluate candidates on a real GPU in a sandboxed worker; the replay evaluator is the counterpart without a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

from outblas.core.config import Candidate, KernelConfig, KernelKind, kernel_kind
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.install_hint import lab_hint
from outblas.core.phase_times import PhaseTimer, PhaseTotals
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Baselines, Options
from outblas.kernels.epilogue import why_not_fused
from outblas.workers.compile_ahead import BackgroundCompiler
from outblas.workers.gate_handler import make_gate_handler
from outblas.workers.handler import WorkItem, make_handler
from outblas.workers.sandbox import STEP_TIMEOUT_S, Sandbox, WorkerLoss, factory_name

__all__ = ["Baselines", "LiveEvaluator", "Options"]

_FACTORY, _OF_GATES = factory_name(make_handler), factory_name(make_gate_handler)


class FreeEvaluator(Protocol):
    """Evaluates free kernels, which are candidates without a template."""

    def evaluate(self, problem: Problem, kernels: Sequence[Candidate]) -> Iterator[tuple[Evaluation, Baselines | None]]:
        """Yield the evaluation of each kernel, with the baselines of the same rounds."""

    def may_falsify(self, kernel: Candidate) -> bool:
        """Return whether a kernel runs in the process that times it, and could falsify baselines."""

    def close(self) -> None:
        """End all workers."""


class FreeWorkers(Protocol):
    """Settings of the workers for free kernels."""

    def evaluator(self, options: Options, step_timeout_s: float) -> FreeEvaluator:
        """Return a new evaluator of free kernels; the arguments are those of :class:`LiveEvaluator`."""


class LiveEvaluator(Evaluator, AbstractContextManager["LiveEvaluator"]):
    """Evaluate on a real GPU through one sandboxed worker (the contract of outblas.core.evaluator).

    Free kernels run in workers of another kind. Use the evaluator as a context manager, or call :meth:`close`.

    Args:
        gpu_index: CUDA ordinal; used only if ``options`` is None.
        options: settings of proof and timing, with the GPU; None: the defaults of :class:`Options`.
        step_timeout_s: seconds without progress that count as a hang, apart from the time that the options allow for
            timing.
        factory: ``module:function`` that makes the worker's handler; tests pass another. None: that of the options.
        offered: returns a problem's candidates; None: :func:`outblas.kernels.catalogue.candidates`.
        compile_ahead: fill the compile cache on all cores of this machine, because the worker has one core. Pass False
            if another process fills it.
        free: workers for free kernels; None: a free kernel raises ToolchainMissing.
    """

    def __init__(
        self, gpu_index: int = 0, options: Options | None = None, step_timeout_s: float = STEP_TIMEOUT_S,
        factory: str | None = None, offered: Callable[[Problem], Sequence[KernelConfig]] | None = None,
        compile_ahead: bool = True, free: FreeWorkers | None = None,
    ) -> None:  # fmt: skip
        self.options = options or Options(gpu_index, _gpu_of(gpu_index))
        timed = self.options.warmup_seconds + self.options.benchmark_seconds  # without a word meanwhile
        self._step_s = step_timeout_s + 2 * timed
        factory = factory or (_OF_GATES if self.options.epilogue.on else _FACTORY)
        self.sandbox = Sandbox(factory, (self.options,), self._step_s)
        #: Of this process; its worker has one of its own.
        self.phase_timer = PhaseTimer("waiting")
        self._free = free
        self._free_evaluator: FreeEvaluator | None = None
        self._baselines: dict[Problem, Baselines] = {}
        self._nvmmh: dict[Problem, KernelConfig | None] = {}
        self._fallbacks: dict[Problem, str] = {}
        self._seconds: dict[Problem, str] = {}
        self._trusted: set[KernelKind] = set()
        self._offered = offered
        self._to_list: deque[Problem] = deque()
        self._listed: dict[Problem, Sequence[KernelConfig]] = {}
        self._compiler = BackgroundCompiler(self.gpu, epilogue=self.options.epilogue) if compile_ahead else None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the worker now; without this call, the first candidate starts it. A start takes seconds.

        Raises:
            DeviceError: the worker cannot start.
        """
        self.sandbox.start()

    def close(self) -> None:
        """End the workers and the compiling processes."""
        self.sandbox.close()
        if self._free_evaluator is not None:
            self._free_evaluator.close()
        if self._compiler is not None:
            self._compiler.close()

    def accounts(self) -> dict[str, PhaseTotals]:
        """Return the seconds spent, per process and phase.

        ``gpu`` is the sandboxed process; outblas.workers.handler names its phases. ``host`` is this process. The worker
        waits for its phases ``expect`` and ``compile``. ``ahead`` is work for later problems while the worker runs, and
        ``waiting`` is idle time.
        """
        lost = PhaseTotals({}, {"workers lost": self.sandbox.lost})
        return {"gpu": self.sandbox.account + lost, "host": self.phase_timer.totals()}

    @property
    def gpu(self) -> Gpu:
        return self.options.gpu

    @property
    def source(self) -> str:
        return f"cuda:{self.options.gpu_index}"

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return the configs that the evaluator offers for the problem, in the order in which they are listed.

        These are ``offered(problem)`` if the constructor got ``offered``; else
        :func:`outblas.kernels.catalogue.candidates` of the problem and the GPU, without those that cannot have the
        options' epilogue. An empty list is possible.
        """
        if problem in self._listed:
            return self._listed.pop(problem)
        from outblas.kernels.catalogue import candidates

        if self._offered is not None:
            return self._offered(problem)
        found, epilogue = candidates(problem, self.gpu), self.options.epilogue
        return [c for c in found if why_not_fused(problem, c, epilogue) is None] if epilogue.on else found

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        """Yield one evaluation per pair, as they finish; consecutive pairs of one problem are timed together.

        Raises:
            DeviceError: the worker cannot start, or fails through no fault of a candidate.
            ToolchainMissing: a required package is not installed.
        """
        if isinstance(pairs, Collection):
            self.expect(dict.fromkeys(p for p, c in pairs if isinstance(c, KernelConfig)))
        for templates, several in groupby(pairs, key=lambda pair: isinstance(pair[1], KernelConfig)):
            one_kind: Iterator[Any] = several
            yield from self._evaluate_templates(one_kind) if templates else self._evaluate_free(list(one_kind))

    def _evaluate_free(self, listed: Sequence[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        if self._free is None:
            raise ToolchainMissing("free kernels need workers from outblas-lab", "a template kernel", lab_hint())
        if self._free_evaluator is None:
            self._free_evaluator = self._free.evaluator(self.options, self._step_s)
        own = self._free_evaluator
        for problem, group in groupby(listed, key=lambda pair: pair[0]):
            for evaluation, baselines in own.evaluate(problem, [kernel for _, kernel in group]):
                # Baselines that could be falsified are used only if the problem has no others.
                known = problem in self._baselines
                if baselines is not None and not (known and own.may_falsify(evaluation.config)):
                    self._baselines[problem] = baselines
                yield evaluation

    def _evaluate_templates(self, pairs: Iterator[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
        """Evaluate one problem at a time; meanwhile, draw later problems and compile their kernels."""
        ahead = Lookahead(pairs, self._begin)

        def meanwhile() -> None:
            with self.phase_timer.phase("ahead"):
                ahead.more()
                self._list_some()

        while group := ahead.next():
            problem = group[0][0]
            if self._compiler is not None:
                with self.phase_timer.phase("compile"):
                    self._compiler.wait(self._with_rival(group))
            items = [self._item(problem, config) for _, config in group]
            for index, value in self.sandbox.run(items, meanwhile):
                yield self._taken(problem, items[index][1], value)

    def _item(self, problem: Problem, config: KernelConfig | None) -> WorkItem:
        return WorkItem(
            problem, config, self._nvmmh.get(problem),
            proved=config is not None and kernel_kind(problem, config) in self._trusted,
            fallback=self._fallbacks.get(problem), second=self._seconds.get(problem, ""),
        )  # fmt: skip

    def _begin(self, group: list[tuple[Problem, KernelConfig]]) -> None:
        self.expect([group[0][0]])
        if self._compiler is not None:
            self._compiler.begin(self._with_rival(group))

    def _with_rival(self, group: list[tuple[Problem, KernelConfig]]) -> list[tuple[Problem, KernelConfig]]:
        """Return the pairs of one problem, with a pair for nvMatmulHeuristics' choice if it has one."""
        problem = group[0][0]
        rival = self._nvmmh.get(problem)
        return group if rival is None else [*group, (problem, rival)]

    def _list_some(self) -> None:
        """List candidates of some expected problems now, before a request for them."""
        for _ in range(min(PROBLEMS_AT_A_TIME, len(self._to_list))):
            problem = self._to_list.popleft()
            if problem not in self._listed:
                self._listed[problem] = self.candidates(problem)

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Return baseline name -> median microseconds from the problem's last rounds; measure now if it has none.

        Names are those of :data:`outblas.core.rivals.BASELINE_NAMES`, e.g. ``lt_auto``. It is empty if the worker was
        lost.
        """
        return {name: t.median_us for name, t in self.baseline_report(problem).timings.items()}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return self.baseline_report(problem).details.get(name, "")

    def baseline_report(self, problem: Problem) -> Baselines:
        """Return the baselines of a problem's last rounds; measure now if it has none.

        Returns:
            Timings with their samples in microseconds, details, and the reason for each baseline that was left out. If
            the worker was lost, there are no timings and ``left_out`` has the key ``all``.

        Raises:
            DeviceError: the worker cannot start.
        """
        if problem not in self._baselines:
            self.expect([problem])
            for _, value in self.sandbox.run([self._item(problem, None)]):
                lost = isinstance(value, WorkerLoss)
                self._baselines[problem] = Baselines(left_out={"all": value.detail}) if lost else value[1]
        return self._baselines[problem]

    def _taken(self, problem: Problem, config: Any, value: Any) -> Evaluation:
        if isinstance(value, WorkerLoss):
            return Evaluation(problem, config, value.status, value.detail, Verdict(value.status, (), value.detail))
        evaluation, baselines = value
        if baselines is not None:
            self._baselines[problem] = baselines
        return evaluation  # type: ignore[no-any-return]

    def time_fallbacks(self, fallbacks: Mapping[Problem, str]) -> None:
        """Time from now on what ``outblas.matmul`` runs without a kernel, as baseline ``fallback``.

        Example: ``{problem: "id=66 tile=10 splitk=1 ..."}`` times that algorithm of cuBLASLt; ``{problem: ""}`` times
        torch.matmul.

        Args:
            fallbacks: problem -> algorithm (:attr:`outblas.records.library_row.LibraryRow.fallback`), or an empty text.
                A problem that is in no call has no such baseline.
        """
        self._fallbacks.update(fallbacks)

    def time_second_algorithms(self, algorithms: Mapping[Problem, str]) -> None:
        """Time from now on the algorithms that second winners run, as baseline ``second_algorithm``.

        Args:
            algorithms: problem -> algorithm (:attr:`outblas.records.library_row.SecondWinner.algorithm`). A problem
                that is in no call has no such baseline.
        """
        self._seconds.update(algorithms)

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        self._trusted.update(kinds)

    def expect(self, problems: Iterable[Problem]) -> None:
        """Ask nvMatmulHeuristics for its choices for problems that come next, all in one subprocess.

        The call is optional: it saves a subprocess of 0.07 s per problem. It does nothing if the options do not time
        the baseline ``nvmmh``. If the package is not installed, the problems have no choice.
        """
        new = [p for p in problems if p not in self._nvmmh]
        if not new or "nvmmh" not in self.options.baselines:
            return
        from outblas.judge.matmul_heuristics import nvmmh_configs

        with self.phase_timer.phase("expect"):
            try:
                self._nvmmh.update(nvmmh_configs(new, self.gpu))
            except ToolchainMissing:
                self._nvmmh.update(dict.fromkeys(new))

    def list_ahead(self, problems: Iterable[Problem]) -> None:
        """List the candidates of these problems later, while this thread waits for the worker. Return at once.

        The call is optional: it saves 0.02 s per problem in a later call of :meth:`candidates`, whose result is the
        same. It replaces the problems of an earlier call.
        """
        self._to_list = deque(problems)
        self._listed = {p: self._listed[p] for p in self._to_list if p in self._listed}

    def compile_soon(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> None:
        """Start to compile kernels that will be evaluated, on all cores. The call is optional.

        Raises:
            ToolchainMissing: NVRTC is not installed.
        """
        if self._compiler is not None:
            self._compiler.begin(pairs)


def _gpu_of(gpu_index: int) -> Gpu:
    from outblas.runtime.device import gpu_of_device

    return gpu_of_device(gpu_index)


#: Most problems drawn ahead: their kernels are compiled (0.3 s) before they are needed. Number at a time: one
#: more than is used up meanwhile.
MAX_PROBLEMS_AHEAD, PROBLEMS_AT_A_TIME = 8, 2

_C = TypeVar("_C")


class Lookahead(Generic[_C]):
    """Groups of consecutive pairs (problem, candidate) with the same problem, drawn some groups ahead.

    :meth:`next` returns a group; :meth:`more` draws groups ahead. Nothing is drawn before the first of these calls. A
    problem that returns after another one makes a new group.

    Example: with the pairs (p, 1), (p, 2), (q, 3), the calls of :meth:`next` return ``[(p, 1), (p, 2)]``, ``[(q, 3)]``,
    then None.

    Args:
        pairs: the pairs, drawn lazily and never by two threads at once.
        drawn: function that is called once with each group, a list of pairs, at the moment when it is drawn. Its result
            is ignored.
    """

    def __init__(self, pairs: Iterable[tuple[Problem, _C]], drawn: Callable[[list[tuple[Problem, _C]]], None]) -> None:
        self._groups = groupby(pairs, key=lambda pair: pair[0])
        self._tell = drawn
        self._drawn: deque[list[tuple[Problem, _C]]] = deque()

    def next(self) -> list[tuple[Problem, _C]] | None:
        """Return the pairs of the next group, drawing it if it is not drawn yet; None after the last."""
        if not self._drawn:
            self._draw()
        return self._drawn.popleft() if self._drawn else None

    def more(self) -> None:
        """Draw up to two more groups, but no more than eight ahead of :meth:`next`. At the end of the pairs it does
        nothing.
        """
        for _ in range(min(PROBLEMS_AT_A_TIME, MAX_PROBLEMS_AHEAD - len(self._drawn))):
            self._draw()

    def _draw(self) -> None:
        for _, group in self._groups:
            listed = list(group)
            self._tell(listed)
            self._drawn.append(listed)
            return
