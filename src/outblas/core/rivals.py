"""Names of the baselines, the rule for *the* baseline, and the interface that kernels and baselines share.

The implementations need a GPU; they are in :mod:`outblas.judge.baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from outblas.core.problem import Problem

#: All baselines, in the order of reports.
BASELINE_NAMES = ("torch", "cublas", "lt_heuristic", "lt_auto", "nvmmh")
#: Baselines whose detail names a cuBLASLt algorithm, which dispatch can run as a fall-back: the heuristic's first
#: choice, and the autotuned one.
LT_HEURISTIC, LT_AUTO = "lt_heuristic", "lt_auto"
#: The fastest of these is *the* baseline. nvmmh is left out: NVIDIA's heuristic chooses among the kernels of this
#: package.
RIVALS = ("torch", "cublas", "lt_heuristic", "lt_auto")
#: Baselines that a bench times beside those, to be published: torch.matmul without reduced-precision reductions, and
#: ``lt_auto`` with programmatic edges put on its captured nodes. ``clock`` computes nothing and times the clock itself.
TORCH_FULL, LT_EDGES, CLOCK = "torch_full", "lt_edges", "clock"
BENCH_BASELINES = (*BASELINE_NAMES, TORCH_FULL, LT_EDGES, CLOCK)
#: Those of :data:`BASELINE_NAMES` in words.
BASELINE_WORDS = {
    "torch": "torch.matmul", "cublas": "cuBLAS", LT_HEURISTIC: "cuBLASLt's first choice",
    LT_AUTO: "autotuned cuBLASLt", "nvmmh": "nvMatmulHeuristics",
}  # fmt: skip
#: Number of algorithms that ``lt_auto`` requests from cuBLASLt.
AUTO_REQUEST = 100


def fastest_baseline(times: Mapping[str, float]) -> str:
    """Return the name of *the* baseline: the fastest of torch, cublas, lt_heuristic and lt_auto in ``times``.

    Of equal times, the first in that order wins. Other names, such as nvmmh, count only if none of the four is there.

    Args:
        times: baseline name -> microseconds. An empty one raises ValueError.
    """
    rivals = [name for name in RIVALS if name in times] or list(times)
    return min(rivals, key=lambda name: times[name])


class BaselineCall(Protocol):
    """A function that enqueues one GEMM, on operands that :meth:`Bindable.bind` has fixed, and does nothing else.

    It returns None, without waiting for the GPU. It may be called often.

    Args:
        stream: raw CUstream handle, an integer.
    """

    def __call__(self, stream: int) -> None: ...


class CallFromC(NamedTuple):
    """A call of a C function with all its arguments, as the clock of server mode makes it without Python.

    Attributes:
        function: its address; it returns 0 for success.
        words: its arguments, at most 19, all integers or pointers.
        keep: what must live as long as the call, e.g. memory whose address is an argument.
    """

    name: str
    function: int
    words: tuple[int, ...]
    keep: Any = None


class Bindable(Protocol):
    """An implementation of GEMM: a kernel of this package or a baseline. A Protocol with one method, ``bind``."""

    name: str

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that computes the problem on fixed operands. Nothing is computed before the call.

        The call reads the values that A and B hold then. It takes the raw CUstream handle: ``call(stream)``.

        Args:
            a: A, a torch CUDA tensor of shape (M, K), row-major.
            b: B, of shape ``problem.b_shape``, row-major.
            c: C, of shape (M, N), row-major; the call overwrites it.
        """
