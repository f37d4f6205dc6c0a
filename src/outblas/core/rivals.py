"""The names of what our kernels are measured against, which of them is *the* baseline, and what all of them can do.

The implementations, which need a GPU, are in :mod:`outblas.judge.baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from outblas.core.problem import Problem

#: Names in the order in which they are reported.
BASELINE_NAMES = ("torch", "cublas", "lt_heuristic", "lt_auto", "nvmmh")
#: Those whose detail names an algorithm, which a fall-back can run: the heuristic's first, and the autotuned one.
LT_HEURISTIC, LT_AUTO = "lt_heuristic", "lt_auto"
#: Those whose fastest is *the* baseline; nvmmh is another's choice of our own kernels.
RIVALS = ("torch", "cublas", "lt_heuristic", "lt_auto")
#: Algorithms asked of cuBLASLt by ``lt_auto``.
AUTO_REQUEST = 100


def fastest_baseline(times: Mapping[str, float]) -> str:
    """Name of *the* baseline among ``times`` (name -> microseconds): the fastest of :data:`RIVALS`.

    nvmmh counts only where nothing else was timed.
    """
    rivals = [name for name in RIVALS if name in times] or list(times)
    return min(rivals, key=lambda name: times[name])


class BaselineCall(Protocol):
    """Enqueues one GEMM on a raw CUstream handle and does nothing else."""

    def __call__(self, stream: int) -> None: ...


class Bindable(Protocol):
    """A way to compute a GEMM; ours and the baselines alike."""

    name: str

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Fix the operands: torch CUDA tensors A (M, K), B as stored, C (M, N), all row-major."""
