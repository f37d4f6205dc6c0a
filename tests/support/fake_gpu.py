"""A live evaluator without a GPU: figures are functions of (problem, config), failures are ordered by the test."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.phase_times import PhaseTotals
from outblas.core.problem import Problem
from outblas.core.rivals import BENCH_BASELINES, RIVALS
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.tune.live_evaluator import Baselines
from support.gpus.known import H200

PROVENANCE = {
    "gpu": "NVIDIA H200 (a fake)",
    "driver": "0",
    "toolchain": {"outblas": "0"},
    "date": "2000-01-01",
    "commit": "0",
    "command": "test",
}
STATE = {"sm_clock_mhz": 1700, "temperature_c": 45}
#: Baseline -> microseconds, the same for every problem; lt_auto is the fastest.
BASELINES_US = {"torch": 5.0, "cublas": 4.5, "lt_heuristic": 4.25, "lt_auto": 4.0, "nvmmh": 3.0}
#: What only a bench times.
BENCH_ONLY_US = {"torch_full": 5.5, "lt_edges": 3.5, "clock": 0.1, "fallback": 4.1, "second_algorithm": 3.9}


def time_us(problem: Problem, config: KernelConfig) -> float:
    """1.0 to 3.0 us, another figure for every cell."""
    return 1.0 + zlib.crc32(f"{problem.key}:{config_name(config)}".encode()) % 2000 / 1000


def timing(us: float, rounds: int = 9, mode: str = "offline") -> Timing:
    return Timing(mode, (us,) * rounds, us, 0.01, 32, 4)


class FakeGpu:
    """State that all evaluators of a test share: records of their calls, and planned failures.

    Attributes:
        statuses: (problem, config) -> status, if it is not PASSED.
        interrupt: problem -> error that ``evaluate`` raises at it.
        missing: names of baselines that cannot be timed.
        asked: (gpu index, problem, configs) of every call of ``evaluate``.
        options: options of every evaluator that was made.
        closed: number of closed evaluators.
        expected: (gpu index, problems) of every call of ``expect``.
        listed_ahead: problems of every call of ``list_ahead``.
        fallbacks: problem -> algorithm of every call of ``time_fallbacks``.
        compiled: (gpu index, pairs) of every call of ``compile_soon``.
        trusted: kinds of every call of ``trust``.
    """

    def __init__(self) -> None:
        self.statuses: dict[tuple[Problem, KernelConfig], Status] = {}
        self.interrupt: dict[Problem, BaseException] = {}
        self.missing: set[str] = set()
        self.asked: list[tuple[int, Problem, tuple[KernelConfig, ...]]] = []
        self.options: list[Options] = []
        self.closed = 0
        self.expected: list[tuple[int, tuple[Problem, ...]]] = []
        self.listed_ahead: list[tuple[Problem, ...]] = []
        self.fallbacks: dict[Problem, str] = {}
        self.compiled: list[tuple[int, tuple[tuple[Problem, KernelConfig], ...]]] = []
        self.trusted: list[Any] = []

    def evaluator(
        self, gpu_index: int = 0, options: Options | None = None,
        offered: Callable[[Problem], Sequence[KernelConfig]] | None = None, **_: Any,
    ) -> FakeEvaluator:  # fmt: skip
        """In place of the class LiveEvaluator."""
        options = options or Options(gpu_index, H200)
        self.options.append(options)
        return FakeEvaluator(self, gpu_index, options, offered)


class FakeEvaluator:
    def __init__(
        self, state: FakeGpu, index: int, options: Options,
        offered: Callable[[Problem], Sequence[KernelConfig]] | None = None,
    ) -> None:  # fmt: skip
        self._state, self._index, self.options, self._offered = state, index, options, offered
        self.gpu, self._fallbacks, self._seconds = options.gpu, set[Problem](), set[Problem]()

    def __enter__(self) -> FakeEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._state.closed += 1

    @property
    def source(self) -> str:
        return f"cuda:{self._index}"

    def expect(self, problems: Iterable[Problem]) -> None:
        self._state.expected.append((self._index, tuple(problems)))

    def trust(self, kinds: Iterable[Any]) -> None:
        self._state.trusted += kinds

    def time_fallbacks(self, fallbacks: Mapping[Problem, str]) -> None:
        self._fallbacks.update(fallbacks)
        self._state.fallbacks.update(fallbacks)

    def time_second_algorithms(self, algorithms: Mapping[Problem, str]) -> None:
        self._seconds.update(problem for problem, algorithm in algorithms.items() if algorithm)

    def list_ahead(self, problems: Iterable[Problem]) -> None:
        self._state.listed_ahead.append(tuple(problems))

    def compile_soon(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> None:
        self._state.compiled.append((self._index, tuple(pairs)))

    def accounts(self) -> dict[str, PhaseTotals]:
        return {"gpu": PhaseTotals({"time": 5.0, "prove": 8.4, "idle": 0.2}), "host": PhaseTotals({"waiting": 13.4})}

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        return candidates(problem, self.gpu) if self._offered is None else self._offered(problem)

    def candidates_of(self, problems: Sequence[Problem]) -> dict[Problem, Sequence[KernelConfig]]:
        return {problem: self.candidates(problem) for problem in problems}

    def baselines(self, problem: Problem) -> dict[str, float]:
        return {name: t.median_us for name, t in self.baseline_report(problem).timings.items()}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return self.baseline_report(problem).details.get(name, "")

    def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
        listed = list(pairs)
        for problem in dict.fromkeys(p for p, _ in listed):
            self._state.asked.append((self._index, problem, tuple(c for p, c in listed if p == problem)))
            if problem in self._state.interrupt:
                raise self._state.interrupt[problem]
        for problem, config in reversed(listed):  # answers come in any order
            yield self._answer(problem, config)

    def baseline_report(self, problem: Problem) -> Baselines:
        names = [n for n in BENCH_BASELINES if n in self.options.baselines and n not in self._state.missing]
        names += ["fallback"] if problem in self._fallbacks else []
        names += ["second_algorithm"] if problem in self._seconds else []
        left_out = dict.fromkeys(sorted(self._state.missing), "it was lost")
        found = {n: timing((BASELINES_US | BENCH_ONLY_US)[n], self.options.rounds) for n in names}
        return Baselines(found, {n: f"{n}'s algorithm" for n in names}, left_out)

    def _answer(self, problem: Problem, config: KernelConfig) -> Evaluation:
        status = self._state.statuses.get((problem, config), Status.PASSED)
        if status is not Status.PASSED:
            return Evaluation(problem, config, status, "as ordered", Verdict(status, (), "as ordered"))
        us = time_us(problem, config)
        rivals = {n: t.median_us for n, t in self.baseline_report(problem).timings.items() if n in RIVALS}
        speedup = None
        if rivals and self.options.speedups:
            best = min(rivals, key=lambda name: rivals[name])
            speedup = Speedup(best, rivals[best] / us, (rivals[best] - 0.1) / us, (rivals[best] + 0.1) / us)
        return Evaluation(
            problem, config, status, "", Verdict(status, ("static", "memory"), "", 0.5),
            timing(us, self.options.rounds), dict(BASELINES_US), speedup,
        )  # fmt: skip


def install(monkeypatch: Any, module: Any) -> FakeGpu:
    """Put a fake GPU under ``outblas_lab.pool.run_bench``, ``outblas_lab.pool.record_suite`` or
    ``outblas.tune.eval_problem``."""
    state = FakeGpu()
    monkeypatch.setattr(module, "LiveEvaluator", state.evaluator)
    monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(module, "collect_provenance", lambda command, index=0: {**PROVENANCE, "command": command})
    if hasattr(module, "gpu_state"):
        monkeypatch.setattr(module, "gpu_state", lambda index=0: dict(STATE))
    return state
