"""The fall-back of ``outblas.matmul``, which runs where the library has no kernel, as an entry for the clock."""

from __future__ import annotations

from typing import Any

from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall
from outblas.judge.torch_baselines import TorchMm

#: Name of the entry among the baselines of a report. It is no rival.
FALLBACK = "fallback"
#: The same for the algorithm of a second winner, which is another than that of the row's fall-back.
SECOND_ALGORITHM = "second_algorithm"


class FallbackEntry:
    """torch.matmul, or the algorithm of cuBLASLt that a library names for a problem, as an entry for the clock.

    :meth:`name_algorithm` comes first; without it torch.matmul runs. :meth:`bind` then gives the call.
    """

    def __init__(self, gpu_index: int = 0, name: str = FALLBACK) -> None:
        self.name = name
        self._torch = TorchMm(gpu_index)
        self._algorithms: Any = None
        self._workspace: Any = None
        self._named: dict[Problem, str] = {}

    def name_algorithm(self, problem: Problem, algorithm: str) -> None:
        """Name what runs a problem; return None. A later name replaces an earlier one.

        Args:
            algorithm: a description of :func:`outblas.runtime.cublas.describe`, e.g. ``"id=66 tile=20 splitk=1 ..."``;
                empty: torch.matmul.
        """
        self._named[problem] = algorithm

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return ``call(stream)`` of the named algorithm; of torch.mm if none is named or this cuBLASLt lacks it.

        Args:
            a: (M, K).
            b: B as stored.
            c: (M, N), the output.
        """
        found = self._find(problem)
        if found is None:
            return self._torch.bind(problem, a, b, c)
        from outblas.runtime.workspace import allocate

        # All calls share it: with one for each operand set, partial sums would leave the L2 cache. An algorithm with
        # 49 parts of K then takes 3% longer.
        if found.workspace_bytes and (self._workspace is None or self._workspace.nbytes < found.workspace_bytes):
            self._workspace = allocate(found.workspace_bytes, a.device)
        space = self._workspace if found.workspace_bytes else None
        return lambda stream: found(a, b, c, stream, space)

    def detail(self, problem: Problem) -> str:
        """Return the description of what runs the problem: the algorithm's name, or :meth:`TorchMm.detail` of torch."""
        found = self._find(problem)
        return self._torch.detail(problem) if found is None else self._named[problem]

    def _find(self, problem: Problem) -> Any:
        """Return the algorithm of a problem; None: torch computes it."""
        from outblas.runtime.cublaslt import LtAlgorithms

        algorithm = self._named.get(problem, "")
        if not algorithm:
            return None
        self._algorithms = self._algorithms or LtAlgorithms()
        return self._algorithms.find(problem, algorithm)
