"""A gate with SiLU in the clock: a kernel that has it as its epilogue, and rivals that compute it in one pass more.

Both read a weight whose rows of gate lie above those of up. A rival writes its product to C, as without a gate, and the
pass writes to a buffer of its own. A fused kernel writes the result to the first half of C.
"""

from __future__ import annotations

from typing import Any

from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.judge.fused_gates import fused_error_bound, fused_reference
from outblas.judge.gates import CellProver
from outblas.judge.gpu_clock import GpuClock, choose_algorithm
from outblas.judge.operands import CANARY, torch_dtype
from outblas.kernels.epilogue import STACKED_GATE
from outblas.kernels.geometry import workspace_bytes
from outblas.runtime.fused_launch import Extra, FusedKernel
from outblas.runtime.workspace import allocate


def half_of(c: Any) -> Any:
    """Return the first half of C's memory, (M, N), as the result of a gate, (M, N / 2)."""
    rows, columns = c.shape
    return c.flatten()[: rows * columns // 2].view(rows, columns // 2)


class GateEntry:
    """A fused kernel as an entry of the clock. Its calls share one workspace, so they must run on one stream.

    Args:
        kernel: compiled with :data:`outblas.kernels.epilogue.STACKED_GATE`.

    Attributes:
        fused: the kernel, for proofs.
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
