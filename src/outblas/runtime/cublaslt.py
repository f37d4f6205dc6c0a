"""Run the cuBLASLt algorithm that a library row names, for problems in which no kernel of this package wins.

cuBLASLt's algorithms are opaque, and their order changes between versions. So a library stores their description
(:func:`outblas.runtime.cublas.describe`). To find an algorithm again, the heuristic is asked for the list that
autotuning timed, for operands aligned to 16 bytes. The result with that description is used. If it is missing, or
cuBLASLt is, torch computes the product.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.problem import ROW_ALIGN_BYTES, Problem
from outblas.core.rivals import AUTO_REQUEST
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.cublas import WORKSPACE_BYTES, Algo, CublasLt, describe
from outblas.runtime.driver import check, driver
from outblas.runtime.recent_entries import keep, touch

if TYPE_CHECKING:
    from outblas.runtime.cublas import LtPlan

_LOG = logging.getLogger(__name__)
#: Number of the heuristic's answers, and of algorithms with their descriptors or failures, that are kept.
MAX_ANSWERS, MAX_FOUND = 4096, 1024


class PreparedAlgorithm(NamedTuple):
    """The numbers of a cublasLtMatmul call without addresses and stream, for ``outblas.dispatch._native``.

    Attributes:
        context: CUcontext in which the handle was made.
        numbers: see :meth:`outblas.runtime.cublas.LtPlan.numbers`.
        algo: bytes of the cublasLtMatmulAlgo_t.
        workspace_bytes: size of the stream's workspace; 0: the call takes none.
        output: shape, strides and torch dtype of C.
    """

    context: int
    numbers: tuple[int, ...]
    algo: bytes
    workspace_bytes: int
    keep: Any
    output: tuple[Any, ...]


class LtAlgorithm:
    """The cuBLASLt algorithm of one problem on one device. Call it to enqueue a product: ``algorithm(a, b, c,
    stream)``.

    :meth:`LtAlgorithms.find` makes it. :meth:`prepared` returns the call as numbers.

    Attributes:
        workspace_bytes: size of the stream's workspace: the kernels' counters, then ``WORKSPACE_BYTES`` as when it was
            timed. 0: it takes none.
        ran: True after the first run. Its code is then loaded; a graph capture does not allow loading.
    """

    def __init__(self, problem: Problem, plan: LtPlan, algo: Algo, needs_workspace: bool, context: int) -> None:
        self._problem, self._plan, self._algo, self._context = problem, plan, algo, context
        self.workspace_bytes = COUNTERS_BYTES + WORKSPACE_BYTES if needs_workspace else 0
        self.ran = False

    def __call__(self, a: Any, b: Any, c: Any, stream: int, workspace: Any = None) -> None:
        """Enqueue ``c = a @ b`` on a raw stream.

        Args:
            c: torch CUDA tensor C, overwritten.
            stream: raw CUstream.
            workspace: workspace of the stream; needed if ``workspace_bytes`` is not 0.

        Raises:
            DeviceError: cuBLASLt refused the call.
        """
        space = workspace.data_ptr() + COUNTERS_BYTES if self.workspace_bytes else 0
        self._plan.matmul(self._algo, a.data_ptr(), b.data_ptr(), c.data_ptr(), stream, space)
        self.ran = True

    def prepared(self, c: Any) -> PreparedAlgorithm:
        """Return the call as numbers, for outputs like the tensor ``c``."""
        output = ((self._problem.m, self._problem.n), (self._problem.n, 1), c.dtype)
        numbers, algo = self._plan.numbers(), bytes(self._algo)
        return PreparedAlgorithm(self._context, numbers, algo, self.workspace_bytes, self._plan, output)


class LtAlgorithms:
    """The cuBLASLt handle of one device, with the algorithms that were looked up. It is opened by the first
    :meth:`find`.

    :meth:`find` looks an algorithm up, :meth:`get` only remembers, and :meth:`fail` gives a product to torch.
    :meth:`first_answer` says which algorithm the heuristic would take.
    Its methods need the device's context to be current. The last answers, algorithms and failures are kept. An
    algorithm that is dropped is looked up again when it is needed, and its descriptors end with their last user.

    Args:
        make: function without arguments that opens cuBLASLt.
        context: function without arguments that returns the current CUcontext.

    Attributes:
        failed: (problem, algorithm) -> one line on why torch computes the product instead.
    """

    def __init__(self, make: Callable[[], Any] = CublasLt, context: Callable[[], int] | None = None) -> None:
        self._make, self._context = make, context or (lambda: int(check("cuCtxGetCurrent", driver().cuCtxGetCurrent())))
        self._lt: Any = None
        self._absent = ""
        self._found: OrderedDict[tuple[Problem, str], LtAlgorithm] = OrderedDict()
        self.failed: OrderedDict[tuple[Problem, str], str] = OrderedDict()
        self._answers: OrderedDict[Problem, str] = OrderedDict()
        self._all_answers: OrderedDict[Problem, list[str]] = OrderedDict()
        self._lock = threading.RLock()  # reentrant: a signal handler may multiply meanwhile

    @property
    def count(self) -> int:
        return len(self._found)

    def get(self, problem: Problem, algorithm: str) -> LtAlgorithm | None:
        """Return an algorithm that :meth:`find` found before and that is kept; else None."""
        found = self._found.get((problem, algorithm))
        if found is not None:
            touch(self._found, (problem, algorithm))
        return found

    def find(self, problem: Problem, algorithm: str) -> LtAlgorithm | None:
        """Return the algorithm with a description; None if it cannot be used (see :attr:`failed`). Looked up once,
        while it is kept.

        It raises neither DeviceError nor ToolchainMissing: without cuBLAS it returns None, too. The description is a
        text of :func:`outblas.runtime.cublas.describe`, whole: ``id=66 tile=10 splitk=1 ...``.
        """
        key = (problem, algorithm)
        with self._lock:
            if key not in self._found and key not in self.failed:
                start = time.perf_counter()
                try:
                    keep(self._found, key, self._look_up(problem, algorithm), MAX_FOUND)
                    _LOG.debug("cuBLASLt %s found in %.1f ms", algorithm, 1e3 * (time.perf_counter() - start))
                except (DeviceError, ToolchainMissing) as error:
                    self.fail(problem, algorithm, error.wrong)
            return self.get(problem, algorithm)

    def fail(self, problem: Problem, algorithm: str, why: str) -> None:
        """Give a product to torch from now on: :meth:`find` and :meth:`get` then return None.

        ``failed`` gets the line ``"<problem>: cuBLASLt <algorithm> cannot be used: <why>"``. For the problem it has the
        key, e.g. ``64_64_64_TN_fp16_fp32``.
        """
        self._found.pop((problem, algorithm), None)
        line = f"{problem.key}: cuBLASLt {algorithm} cannot be used: {why}"
        keep(self.failed, (problem, algorithm), line, MAX_FOUND)
        _LOG.info("outblas uses torch.matmul: %s", line)

    def first_answer(self, problem: Problem, may_open: bool = True) -> str | None:
        """Return the heuristic's first answer for operands aligned to 256 bytes; asked once per problem.

        Only the host works: the heuristic neither launches nor allocates. Opening cuBLASLt may allocate on the GPU.

        Args:
            may_open: open cuBLASLt if it is not open yet; False while a CUDA graph is captured.

        Returns:
            A text of :func:`outblas.runtime.cublas.describe`. It is empty if cuBLASLt is missing, fails or proposes
            nothing. None: cuBLASLt is not open and may not be opened.
        """
        with self._lock:
            if problem not in self._answers:
                if self._lt is None and not self._absent and not may_open:
                    return None
                keep(self._answers, problem, next(iter(self._ask(problem, 1)), ""), MAX_ANSWERS)
            return self._answers[problem]

    def answers(self, problem: Problem) -> list[str]:
        """Return the algorithms that :meth:`find` finds, the heuristic's first in front; empty if cuBLASLt is missing.

        The last ones are kept, as for :meth:`first_answer`.
        """
        with self._lock:
            if problem not in self._all_answers:
                keep(self._all_answers, problem, self._ask(problem, AUTO_REQUEST, ROW_ALIGN_BYTES), MAX_ANSWERS)
            return self._all_answers[problem]

    def _ask(self, problem: Problem, *request: int) -> list[str]:
        """Return the heuristic's answers to a request, the arguments of :meth:`LtPlan.heuristic`; empty if it fails."""
        try:
            plan = self._open().plan(problem)
            try:
                return [describe(result.algo) for result in plan.heuristic(*request)]
            finally:
                plan.close()
        except (DeviceError, ToolchainMissing) as error:
            _LOG.debug("cuBLASLt has no algorithm for %s: %s", problem.key, error.wrong)
            return []

    def _look_up(self, problem: Problem, algorithm: str) -> LtAlgorithm:
        """Return the algorithm with this description.

        Raises:
            DeviceError: cuBLASLt does not propose it, or proposes nothing.
            ToolchainMissing: cuBLASLt is not installed.
        """
        plan = self._open().plan(problem)
        results = plan.heuristic(AUTO_REQUEST, ROW_ALIGN_BYTES)
        for result in results:
            if describe(result.algo) == algorithm:
                return LtAlgorithm(problem, plan, result.algo, result.workspace > 0, self._context())
        plan.close()
        raise DeviceError(
            f"it is not among the {len(results)} that this cuBLASLt proposes",
            "the cuBLASLt version with which the library was tuned",
            "tune again",
        )

    def _open(self) -> Any:
        """Return the handle. After a failure, raise DeviceError without another attempt."""
        if self._absent:
            raise DeviceError(self._absent, "cuBLASLt", "install the cuBLAS that torch includes")
        if self._lt is None:
            try:
                self._lt = self._make()
            except (DeviceError, ToolchainMissing) as error:
                self._absent = error.wrong
                raise
        return self._lt
