"""What a row names where none of our kernels wins: an algorithm of cuBLASLt, found again by its own words and run.

cuBLASLt's algorithms are opaque and their places in its list change from version to version, so a library has their
description (:func:`outblas.runtime.cublas.describe`). The heuristic is asked for the same list that autotuning timed,
for operands aligned to 16 bytes, and the result of that description is taken. Where there is none, or no cuBLASLt, the
product is torch's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.problem import ROW_ALIGN_BYTES, Problem
from outblas.core.rivals import AUTO_REQUEST
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.cublas import WORKSPACE_BYTES, Algo, CublasLt, describe
from outblas.runtime.driver import check, driver

if TYPE_CHECKING:
    from outblas.runtime.cublas import LtPlan

_LOG = logging.getLogger(__name__)


class PreparedAlgorithm(NamedTuple):
    """A call of cublasLtMatmul without its addresses and its stream: what ``outblas.dispatch._native`` is given.

    Attributes:
        context: the driver's, in which the handle was made. numbers: of :meth:`outblas.runtime.cublas.LtPlan.numbers`.
        algo: cublasLtMatmulAlgo_t. workspace_bytes: of the stream's workspace, 0: it takes none.
        keep: what must live for as long as the numbers are used. output: shape, strides and torch dtype of C.
    """

    context: int
    numbers: tuple[int, ...]
    algo: bytes
    workspace_bytes: int
    keep: Any
    output: tuple[Any, ...]


class LtAlgorithm:
    """One problem's algorithm on one device.

    Attributes:
        workspace_bytes: of the stream's workspace: the part that is left to our kernels' counters, and
            ``WORKSPACE_BYTES``, as when it was timed; 0: it takes none.
        ran: whether it was run: its code is then loaded, which a capture does not allow.
    """

    def __init__(self, problem: Problem, plan: LtPlan, algo: Algo, needs_workspace: bool, context: int) -> None:
        self._problem, self._plan, self._algo, self._context = problem, plan, algo, context
        self.workspace_bytes = COUNTERS_BYTES + WORKSPACE_BYTES if needs_workspace else 0
        self.ran = False

    def __call__(self, a: Any, b: Any, c: Any, stream: int, workspace: Any = None) -> None:
        """Enqueue ``c = a @ b`` on a raw stream.

        Args:
            a, b, c: torch tensors as of a decision. workspace: of the stream, where ``workspace_bytes`` is not 0.

        Raises:
            DeviceError: cuBLASLt refused it.
        """
        space = workspace.data_ptr() + COUNTERS_BYTES if self.workspace_bytes else 0
        self._plan.matmul(self._algo, a.data_ptr(), b.data_ptr(), c.data_ptr(), stream, space)
        self.ran = True

    def prepared(self, c: Any) -> PreparedAlgorithm:
        """The call, for outputs like ``c``."""
        output = ((self._problem.m, self._problem.n), (self._problem.n, 1), c.dtype)
        numbers, algo = self._plan.numbers(), bytes(self._algo)
        return PreparedAlgorithm(self._context, numbers, algo, self.workspace_bytes, self._plan, output)


class LtAlgorithms:
    """One device's cuBLASLt: its handle, and what each algorithm that was asked for turned out to be.

    Its methods need the device's context to be current. Descriptors are kept: some hundred bytes for each problem.

    Args:
        make: opens cuBLASLt. context: the driver's handle of the current context.

    Attributes:
        failed: (problem, algorithm) -> why torch has the product, one line.
    """

    def __init__(self, make: Callable[[], Any] = CublasLt, context: Callable[[], int] | None = None) -> None:
        self._make, self._context = make, context or _current_context
        self._lt: Any = None
        self._absent = ""
        self._found: dict[tuple[Problem, str], LtAlgorithm] = {}
        self.failed: dict[tuple[Problem, str], str] = {}
        self._lock = threading.RLock()  # a signal's handler may multiply meanwhile

    @property
    def count(self) -> int:
        """Algorithms found so far."""
        return len(self._found)

    def get(self, problem: Problem, algorithm: str) -> LtAlgorithm | None:
        """The algorithm, where :meth:`find` has found it before."""
        return self._found.get((problem, algorithm))

    def find(self, problem: Problem, algorithm: str) -> LtAlgorithm | None:
        """The algorithm of that description, looked up once; None where :attr:`failed` says why not."""
        key = (problem, algorithm)
        with self._lock:
            if key not in self._found and key not in self.failed:
                start = time.perf_counter()
                try:
                    self._found[key] = self._look_up(problem, algorithm)
                    _LOG.info("cuBLASLt %s found in %.1f ms", algorithm, 1e3 * (time.perf_counter() - start))
                except (DeviceError, ToolchainMissing) as error:
                    self.fail(problem, algorithm, error.wrong)
            return self._found.get(key)

    def fail(self, problem: Problem, algorithm: str, why: str) -> None:
        """From now on the product is torch's."""
        self._found.pop((problem, algorithm), None)
        self.failed[problem, algorithm] = f"{problem.key}: cuBLASLt {algorithm} cannot be used: {why}"
        _LOG.info("outblas uses torch.matmul: %s", self.failed[problem, algorithm])

    def _look_up(self, problem: Problem, algorithm: str) -> LtAlgorithm:
        """Raises DeviceError where it is not in the list or there is no list; ToolchainMissing without cuBLASLt."""
        plan = self._open().plan(problem)
        results = plan.heuristic(AUTO_REQUEST, ROW_ALIGN_BYTES)
        for result in results:
            if describe(result.algo) == algorithm:
                return LtAlgorithm(problem, plan, result.algo, result.workspace > 0, self._context())
        plan.close()
        raise DeviceError(
            f"it is not among the {len(results)} that this cuBLASLt proposes",
            "the version that the library was tuned with",
            "tune again",
        )

    def _open(self) -> Any:
        """The handle; what went wrong the first time is not tried again."""
        if self._absent:
            raise DeviceError(self._absent, "cuBLASLt", "install the cuBLAS that torch brings")
        if self._lt is None:
            try:
                self._lt = self._make()
            except (DeviceError, ToolchainMissing) as error:
                self._absent = error.wrong
                raise
        return self._lt


def _current_context() -> int:
    return int(check("cuCtxGetCurrent", driver().cuCtxGetCurrent()))
