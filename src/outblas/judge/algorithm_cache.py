"""What autotuning chose of cuBLASLt's algorithms, in a file: for the processes of one search, one after the other.

Choosing takes 30 ms a problem, and a search looks at each problem three times or more. What is published is always
chosen anew, by the process that times it (outblas.bench.run_bench).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.journal import Journal
from outblas.core.problem import Problem

#: Size of a cublasLtMatmulAlgo_t (outblas.runtime.cublas_loading.Algo).
ALGORITHM_BYTES = 64


class AlgorithmCache:
    """A journal of choices. Algorithms are opaque words of one version of cuBLASLt on one kind of GPU: a file of
    another is begun anew, and so is a damaged one, for all that it holds can be chosen again. That is why it is no
    worker's own, either: one that takes the place of a worker that hangs does not wait for its end.

    Args:
        about: what the choices hold for, JSON values.

    Raises:
        RecordError: the file cannot be read or written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        try:
            self._journal = Journal(path, about, sole=False)
        except (UsageError, RecordError):
            self._journal = Journal(path, about, resume=False, sole=False)
        try:
            list(self)
        except (OutblasError, AttributeError, KeyError, TypeError, ValueError):
            self._journal.close()
            self._journal = Journal(path, about, resume=False, sole=False)

    def __iter__(self) -> Iterator[tuple[Problem, bytes, str]]:
        """(problem, algorithm, its description), as :meth:`outblas.judge.baselines.LtAuto.set_algorithm` takes them."""
        for entry in self._journal.entries:
            problem, algorithm, detail = (entry[name] for name in ("problem", "algorithm", "detail"))
            if len(algorithm) != 2 * ALGORITHM_BYTES or not isinstance(detail, str):
                raise ValueError(f"no algorithm of {ALGORITHM_BYTES} bytes and its description")
            yield Problem.from_key(problem), bytes.fromhex(algorithm), detail

    def add(self, problem: Problem, algorithm: bytes, detail: str) -> None:
        """Keep one more; raises RecordError where the disk refuses."""
        self._journal.append({"problem": problem.key, "algorithm": algorithm.hex(), "detail": detail})

    @classmethod
    def of_gpu(cls, path: Path, gpu_index: int) -> AlgorithmCache:
        """The file for the cuBLASLt that is loaded, and a GPU with its driver."""
        from outblas.records.provenance import gpu_and_driver
        from outblas.runtime.cublas import version

        gpu, driver = gpu_and_driver(gpu_index)
        return cls(path, {"cublaslt": version(), "gpu": gpu, "driver": driver})
