"""Kernels compiled before they are asked for: a worker beside a GPU has one core, the machine has more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from outblas.core.config import KernelConfig, KernelKind, kernel_kind
from outblas.core.errors import ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue
from outblas.kernels.source import Source, make_source

#: Kernels not compiled yet from which on starting a process per core pays.
MIN_KERNELS_FOR_PROCESSES = 4
#: Cores that compilers leave to each GPU, for its driver and its worker; how far those of the background give way.
CORES_LEFT, BACKGROUND_NICENESS = 2, 10
#: Most processes that stay for later kernels. A GPU needs about three new kernels a second. A host may have one
#: driver per GPU.
MAX_IDLE_COMPILERS = 16


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

        new = _unseen(pairs, self._seen, self._gpu)
        if len(new) >= self._least:
            sources = dict.fromkeys(make_source(p, c, self._epilogue) for p, c in new.values())
            yield from compile_many(list(sources), architecture(self._gpu), self._jobs)


class BackgroundCompiler:
    """Compile kernels in background processes while other kernels are measured.

    :meth:`begin` hands kernels over and returns at once. :meth:`wait` waits for some of them. :meth:`close` ends the
    processes; call it after use, for this is no context manager. The first :meth:`begin` with enough kernels starts
    them.
    Compile errors are not reported. The later use of a kernel raises them.

    Args:
        jobs: number of processes; None: one per usable core but two, from 1 to 16.
        least: number of new kernels that must have come together before the processes start. Default: 4.
    """

    def __init__(self, gpu: Gpu, jobs: int | None = None, least: int = MIN_KERNELS_FOR_PROCESSES) -> None:
        self._gpu, self._jobs, self._least = gpu, jobs, least
        self._seen: set[KernelKind] = set()
        self._few: dict[KernelKind, Source] = {}
        self._begun: dict[KernelKind, Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def begin(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> None:
        """Start to compile the legal kernels that no earlier call named and that the compile cache lacks; return at
        once.

        Until the processes have started, fewer than ``least`` kernels are kept for a later call.

        Raises:
            ToolchainMissing: NVRTC is not installed.
        """
        from outblas.runtime.nvrtc import is_compiled

        arch = architecture(self._gpu)
        for kind, (problem, config) in _unseen(pairs, self._seen, self._gpu).items():
            source = make_source(problem, config)
            if not is_compiled(source, arch):
                self._few[kind] = source
        if self._few and (self._pool is not None or len(self._few) >= self._least):
            self._submit(arch)

    def wait(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> None:
        """Wait until those of these kernels that :meth:`begin` has started are compiled.

        Kernels that it has kept for later are not compiled in the background any more. A compile error is not raised.

        Args:
            pairs: (problem, config) of each kernel. Unknown kernels are ignored.
        """
        for problem, config in pairs:
            kind = kernel_kind(problem, config)
            self._few.pop(kind, None)
            future = self._begun.pop(kind, None)
            if future is None:
                continue
            try:
                future.result()
            except BrokenProcessPool:  # the user of that kernel will report the error
                self.close()

    def close(self) -> None:
        """Cancel what has not begun and let the processes end, without waiting. :meth:`begin` may start new ones."""
        pool, self._pool = self._pool, None
        self._begun.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, arch: str) -> None:
        from outblas.runtime.nvrtc import compile_processes, fill_cache, usable_cores

        self._pool = self._pool or compile_processes(
            self._jobs or max(1, min(MAX_IDLE_COMPILERS, usable_cores() - CORES_LEFT)), BACKGROUND_NICENESS
        )
        same: dict[Source, Future[None]] = {}
        try:
            for kind, source in self._few.items():
                same[source] = same.get(source) or self._pool.submit(fill_cache, source, arch)
                self._begun[kind] = same[source]
        except BrokenProcessPool:
            self.close()
        self._few.clear()


def _unseen(
    pairs: Iterable[tuple[Problem, KernelConfig]], seen: set[KernelKind], gpu: Gpu
) -> dict[KernelKind, tuple[Problem, KernelConfig]]:
    """Legal kernels that are not among those ``seen``, which they join; one problem of each."""
    from outblas.kernels.legality import why_illegal

    new = {
        kind: (problem, config)
        for problem, config in pairs
        if (kind := kernel_kind(problem, config)) not in seen and why_illegal(problem, config, gpu) is None
    }
    seen.update(new)
    return new


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
