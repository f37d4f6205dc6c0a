"""A file of the cuBLASLt algorithms that autotuning chose, for the processes of one search, one after the other.

Choosing takes 30 ms per problem, and a search visits each problem three times or more. Published figures never use
this file: the process that times them chooses anew (outblas.bench.run_bench).
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
    """A file of chosen cuBLASLt algorithms. Iterate over it for (problem, algorithm, description), in order of adding.

    An algorithm is an opaque value of one cuBLASLt version on one kind of GPU. So a file that is damaged, or about
    another version or GPU, is begun anew: its choices are deleted without an error. It is not locked: a replacement
    need not wait until a hung worker ends.

    Args:
        about: the version and GPU for which the choices hold, as JSON values. Another ``about`` empties the file.

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
        """Append one choice to the file. A second choice for a problem is appended, too; both are iterated over.

        Args:
            algorithm: the 64 bytes of the cublasLtMatmulAlgo_t.

        Raises:
            UsageError: the algorithm has another length. Nothing is written.
            RecordError: the disk refuses.
        """
        if len(algorithm) != ALGORITHM_BYTES:  # one such line would empty the file when it is next opened
            raise UsageError(
                f"an algorithm of {len(algorithm)} bytes", f"{ALGORITHM_BYTES} bytes", "pass a cublasLtMatmulAlgo_t"
            )
        self._journal.append({"problem": problem.key, "algorithm": algorithm.hex(), "detail": detail})

    @classmethod
    def of_gpu(cls, path: Path, gpu_index: int) -> AlgorithmCache:
        """Open the file for the loaded cuBLASLt and one GPU with its driver.

        Choices of another cuBLASLt version, GPU name or driver version are deleted.

        Raises:
            ToolchainMissing: cuBLASLt is not installed.
            RecordError: the file cannot be read or written.
        """
        from outblas.records.provenance import gpu_and_driver
        from outblas.runtime.cublas import version

        gpu, driver = gpu_and_driver(gpu_index)
        return cls(path, {"cublaslt": version(), "gpu": gpu, "driver": driver})
