"""Kernels compiled before they are asked for: a worker beside a GPU has one core, the machine has more."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from outblas.core.config import KernelConfig, KernelKind, kernel_kind
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


class BackgroundCompiler:
    """Compile kernels in background processes while other kernels are measured.

    :meth:`begin` hands kernels over and returns at once. :meth:`wait` waits for some of them. :meth:`close` ends the
    processes; call it after use, for this is no context manager. The first :meth:`begin` with enough kernels starts
    them.
    Compile errors are not reported. The later use of a kernel raises them.

    Args:
        jobs: number of processes; None: one per usable core but two, from 1 to 16.
        least: number of new kernels that must have come together before the processes start. Default: 4.
        epilogue: what the kernels compute after the product.
    """

    def __init__(
        self, gpu: Gpu, jobs: int | None = None, least: int = MIN_KERNELS_FOR_PROCESSES,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> None:  # fmt: skip
        self._gpu, self._jobs, self._least, self._epilogue = gpu, jobs, least, epilogue
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
        for kind, (problem, config) in unseen_kernels(pairs, self._seen, self._gpu).items():
            source = make_source(problem, config, self._epilogue)
            if not is_compiled(source, arch):
                self._few[kind] = source
        if self._few and (self._pool is not None or len(self._few) >= self._least):
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


def unseen_kernels(
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
