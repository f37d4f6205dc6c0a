"""An evaluator whose times are functions of M, so that a test knows where winners change. It stands for a live GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.legality import why_illegal
from support.gpus.known import H200

#: Legal up to M = 8, and for every M.
FEW = Sm80GemvConfig(8, 32)
SMALL, LARGE, SPARE = (Sm80MmaConfig(bm, 64) for bm in (32, 64, 128))
KERNELS: tuple[KernelConfig, ...] = (FEW, SMALL, LARGE, SPARE)

Speed = Callable[[int], float]


@dataclass
class Model:
    """The behaviour of the fake GPU, and what it was asked.

    Attributes:
        speedups: kernel -> its speed-up over the baseline at an M.
        fails: whether a kernel fails its proof on a problem.
        algorithm: the algorithm of cuBLASLt that is the fastest baseline at an M, and 10% faster than torch.
        kill_at: number of measurements after which ``error`` is raised; None: never.
        error: the error that is raised then.
        asked: each measured pair.
    """

    speedups: Mapping[KernelConfig, Speed]
    fails: Callable[[Problem, KernelConfig], bool] = lambda problem, config: False
    algorithm: Callable[[int], str] = lambda m: "index=1 id=66"
    kill_at: int | None = None
    error: BaseException = field(default_factory=KeyboardInterrupt)
    asked: list[tuple[Problem, KernelConfig]] = field(default_factory=list)


class ModelledEvaluator(Evaluator):
    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def gpu(self) -> Gpu:
        return H200

    @property
    def source(self) -> str:
        return "cuda:0"

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        return [c for c in self.model.speedups if why_illegal(problem, c, H200) is None]

    def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:
        for problem, config in list(pairs):
            if len(self.model.asked) == self.model.kill_at:
                raise self.model.error
            self.model.asked.append((problem, config))
            yield self._answer(problem, config)

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return {"lt_auto": 10.0, "torch": 11.0}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return self.model.algorithm(problem.m) if name == "lt_auto" else ""

    def _answer(self, problem: Problem, config: KernelConfig) -> Evaluation:
        times = dict(self.baselines(problem))
        if self.model.fails(problem, config):
            verdict = Verdict(Status.WRONG, ("static",), "gate 3")
            return Evaluation(problem, config, Status.WRONG, "gate 3", verdict, baselines_us=times)
        ratio = self.model.speedups[config](problem.m)
        us = times["lt_auto"] / ratio
        timing = Timing("offline", (us,) * 3, us, 0.0, 32, 4)
        speedup = Speedup("lt_auto", ratio, ratio * 0.99, ratio * 1.01)
        verdict = Verdict(Status.PASSED, ("static", "memory"), "", 0.5)
        return Evaluation(problem, config, Status.PASSED, "", verdict, timing, times, speedup)
