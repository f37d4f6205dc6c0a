"""The handler of a worker that tries kernels with a gate: proofs and rivals are those of the fused expression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outblas.core.config import KernelKind, config_name, kernel_kind
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.core.roofline import Gpu, architecture
from outblas.judge.bench_cell import UNFUSED, BenchCell, Options
from outblas.judge.fused_gates import fused_error_bound, fused_reference
from outblas.judge.gates import CellProver
from outblas.judge.gpu_clock import GpuClock, choose_algorithm
from outblas.judge.operands import CANARY, torch_dtype
from outblas.kernels.epilogue import STACKED_GATE, why_not_fused
from outblas.kernels.geometry import workspace_bytes
from outblas.runtime.fused_launch import Extra, FusedKernel
from outblas.runtime.workspace import allocate
from outblas.workers.handler import Handler, WorkItem

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
        return BenchCell(problem, self._options, baselines, self.phase_timer, GateProver)

    def _entries(self, problem: Problem, item: WorkItem) -> dict[str, Any]:
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


def half_of(c: Any) -> Any:
    """Return the first half of C's memory, (M, N), as the result of a gate, (M, N / 2)."""
    rows, columns = c.shape
    return c.flatten()[: rows * columns // 2].view(rows, columns // 2)


class GateEntry:
    """A fused kernel as an entry of the clock. Its calls share one workspace, so they must run on one stream.

    Args:
        kernel: compiled with :data:`outblas.kernels.epilogue.STACKED_GATE`.
    """

    def __init__(self, kernel: FusedKernel) -> None:
        self.name, self.fused = kernel.name, kernel
        self._workspace: Any = None

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that writes the gate, (M, N / 2), to the first half of ``c``."""
        need = workspace_bytes(problem, self.fused.config)
        if need and (self._workspace is None or self._workspace.nbytes < need):
            self._workspace = allocate(need, a.device)
        return self.fused.bind(problem, (a, b, half_of(c)), Extra(), self._workspace if need else None)


class FollowedEntry:
    """A product, and one pass that computes the gate from it, as an entry of the clock.

    Args:
        product: a baseline, or a kernel of this package.
    """

    def __init__(self, product: Bindable, gpu_index: int) -> None:
        self.name, self._product, self._gpu = product.name, product, gpu_index

    def prepare(self, bench: GpuClock) -> None:
        """Choose the product's algorithm, if it has a choice."""
        choose_algorithm(self._product, bench)

    def detail(self, problem: Problem) -> str:
        """Return the product's line; empty for a kernel of this package."""
        of_product = getattr(self._product, "detail", None)
        return "" if of_product is None else str(of_product(problem))

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that writes the product to ``c`` and the gate to a buffer that it owns."""
        import torch

        from outblas.dispatch.fusion.silu_kernel import launch

        multiply, out = self._product.bind(problem, a, b, c), torch.empty_like(half_of(c))

        def call(stream: int) -> None:
            multiply(stream)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._gpu)):
                launch(c, out)

        return call


class GateReference:
    """The gate of one (A, B) in fp64 with its bound, made once and used for every candidate.

    Args:
        a: (M, K).
        b: B as stored, (N, K), with the rows of gate above those of up.
    """

    def __init__(self, problem: Problem, a: Any, b: Any) -> None:
        import torch

        by_turns = torch.stack(b.chunk(2), dim=1).flatten(0, 1)
        z, self._y = fused_reference(problem, a, by_turns, Extra(), STACKED_GATE)
        self._bound = fused_error_bound(problem, a, by_turns, z, self._y, STACKED_GATE)
        # Within its bound, such a value may be past the largest of the output's type, which is an infinity there.
        self._may_overflow = (self._y.abs() + self._bound).to(torch_dtype(problem)).isinf()

    def worst_error_ratio(self, c: Any) -> Any:
        """Return the largest |error| / bound, a 0-dim fp32 tensor; NaN if C holds a NaN where it is written.

        Args:
            c: C, (M, N); the gate is in its first half. A write to the other half gives infinity.
        """
        import torch

        found = half_of(c).double()
        overflow = found.isinf() & self._may_overflow & (found.sign() == self._y.sign())
        ratio = torch.where(overflow, 0.0, (found - self._y).abs() / self._bound)
        behind = (c.flatten()[found.numel() :].view(torch.int16) != CANARY).any()
        return torch.where(behind, torch.inf, ratio.max()).float()


class GateProver(CellProver):
    """Proves fused kernels on operands that are timed; its arguments are those of its base class."""

    def _reference_of(self, a: Any, b: Any) -> Any:
        return GateReference(self.problem, a, b)
