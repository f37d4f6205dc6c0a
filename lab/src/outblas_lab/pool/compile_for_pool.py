"""Kernels of all workers, compiled by the driver on the cores that they leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outblas.core.config import KernelConfig, KernelKind
from outblas.core.errors import ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue
from outblas.kernels.source import make_source
from outblas.workers.compile_ahead import MIN_KERNELS_FOR_PROCESSES, unseen_kernels


class CompileAhead:
    """Fill the compile cache ahead of use. The one method is :meth:`compile`; there is nothing to close.

    Compile errors are not reported. The later use of a kernel raises them.

    Args:
        jobs: number of processes; None: one per usable core.
        least: smallest number of new kernels that are compiled in one call; fewer are left to their users. Default: 4.
    """

    def __init__(
        self, gpu: Gpu, jobs: int | None = None, least: int = MIN_KERNELS_FOR_PROCESSES,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> None:  # fmt: skip
        self._gpu, self._jobs, self._least, self._epilogue = gpu, jobs, least, epilogue
        self._seen: set[KernelKind] = set()

    def compile(self, pairs: Sequence[tuple[Problem, KernelConfig]]) -> Iterator[object]:
        """Compile the legal kernels that no earlier call named, in parallel processes.

        If fewer than ``least`` kernels are new, nothing is compiled and nothing is yielded. Those kernels count as
        named from then on, so a later call leaves them out, too. It is a generator: iterate it, or nothing happens.

        Args:
            pairs: (problem, config) of each kernel. Illegal pairs are ignored.

        Yields:
            One object for each source, as it is compiled or found in the cache. Its value is of no use.

        Raises:
            ToolchainMissing: NVRTC is not installed.
        """
        from outblas.runtime.nvrtc import compile_many

        new = unseen_kernels(pairs, self._seen, self._gpu)
        if len(new) >= self._least:
            sources = dict.fromkeys(make_source(p, c, self._epilogue) for p, c in new.values())
            yield from compile_many(list(sources), architecture(self._gpu), self._jobs)


class BaselineKernels:
    """Kernels of this package that are timed as baseline ``nvmmh``: the choices of nvMatmulHeuristics.

    The one method is :meth:`of`; a second call with the same problems returns an empty list.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._seen: set[Problem] = set()

    def of(self, problems: Iterable[Problem]) -> list[tuple[Problem, KernelConfig]]:
        """Return the choices for the problems that no earlier call named, asked for in one subprocess.

        Returns:
            (problem, config) for each problem with a choice that can be built here. Empty if all were named before, or
                if the package nvMatmulHeuristics is not installed.
        """
        from outblas.judge.matmul_heuristics import nvmmh_configs

        new = [problem for problem in dict.fromkeys(problems) if problem not in self._seen]
        self._seen.update(new)
        if not new:
            return []
        try:
            found = nvmmh_configs(new, self._gpu)
        except ToolchainMissing:
            return []
        return [(problem, config) for problem, config in found.items() if config is not None]
