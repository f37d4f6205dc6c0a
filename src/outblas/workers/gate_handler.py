"""The handler of a worker that tries kernels with a gate: proofs and rivals are those of the fused expression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outblas.core.config import KernelKind, config_name, kernel_kind
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.judge.bench_cell import UNFUSED, BenchCell, Options
from outblas.kernels.epilogue import why_not_fused
from outblas.workers.handler import Handler
from outblas.workers.work_item import WorkItem

if TYPE_CHECKING:
    from outblas.runtime.cubin import Cubin


def make_gate_handler(options: Options) -> GateHandler:
    """Return a new :class:`GateHandler` after its :meth:`Handler.warm_up`, as the factory of a sandbox."""
    handler = GateHandler(options)
    handler.warm_up()
    return handler


class GateHandler(Handler):
    """The handler for candidates that compute :data:`outblas.kernels.epilogue.STACKED_GATE` after the product.

    Each rival is a baseline, or the library's kernel for the product, with one pass more. It is called as its base
    class.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._products: dict[KernelKind, _Product] = {}

    def _why_illegal(self, problem: Problem, config: Any) -> str | None:
        return super()._why_illegal(problem, config) or why_not_fused(problem, config, self._options.epilogue)

    def _loaded(self, cubin: Cubin, config: Any) -> Any:
        from outblas.runtime.fused_launch import FusedKernel
        from outblas.workers.gate_cell import GateEntry

        return GateEntry(FusedKernel(cubin, config, self._options.epilogue))

    def _proof_shapes(self, problem: Problem, config: Any) -> list[Problem]:
        """Return those of the product, with the next N where a kernel takes N in steps of 16: so N is ragged, too."""
        epilogue, shapes = self._options.epilogue, super()._proof_shapes(problem, config)
        fitted = (one if why_not_fused(one, config, epilogue) is None else replace(one, n=one.n + 8) for one in shapes)
        return [one for one in dict.fromkeys(fitted) if self._why_illegal(one, config) is None]

    def _proof(self, kernel: Any, problems: Iterable[Problem]) -> Verdict:
        from outblas.judge.fused_gates import prove_fused

        verdict, worst = Verdict(Status.PASSED), 0.0
        for problem in problems:
            verdict = prove_fused(kernel.fused, problem, f"cuda:{self._options.gpu_index}")
            if verdict.status is not Status.PASSED:
                return Verdict(verdict.status, verdict.gates, f"on {problem.mnk}: {verdict.detail}")
            worst = max(worst, verdict.max_err_ratio or 0.0)
        return Verdict(verdict.status, verdict.gates, "", worst)

    def _new_cell(self, problem: Problem, baselines: dict[str, Any]) -> BenchCell:
        from outblas.workers.gate_cell import GateProver

        return BenchCell(problem, self._options, baselines, self.phase_timer, GateProver)

    def _entries(self, problem: Problem, item: WorkItem) -> dict[str, Any]:
        from outblas.workers.gate_cell import FollowedEntry

        entries = super()._entries(problem, item)
        config = self._options.unfused.get(problem)
        if config is not None:
            entries[UNFUSED] = self._product(problem, config)
        return {name: FollowedEntry(entry, self._options.gpu_index) for name, entry in entries.items()}

    def _product(self, problem: Problem, config: Any) -> Any:
        """Return the library's kernel for the product alone; a failure to build it is that of the rival only."""
        key = kernel_kind(problem, config)
        if key not in self._products:
            self._products[key] = _Product(self._options.gpu, config)
        return self._products[key]


class _Product:
    """A kernel without its gate, built when it is bound."""

    def __init__(self, gpu: Gpu, config: Any) -> None:
        self.name, self._gpu, self._config = config_name(config), gpu, config
        self._kernel: Any = None

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        from outblas.kernels.source import make_source
        from outblas.runtime.launch import load
        from outblas.runtime.nvrtc import compile_tuned

        if self._kernel is None:
            cubin = compile_tuned(make_source(problem, self._config), architecture(self._gpu))
            self._kernel = load(cubin, self._config)
        return self._kernel.bind(problem, a, b, c)
