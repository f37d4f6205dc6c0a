"""A pool of processes that compile, and that end when their parent or one of them does."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

from outblas.core.child_process import LoneContext, LoneProcess, end_with_parent


def compile_processes(jobs: int, nice: int = 0) -> ProcessPoolExecutor:
    """Return a pool of compiling processes that end with this one, even if it is killed.

    Args:
        jobs: most processes.
        nice: as for os.nice; 0: no change.
    """
    return ProcessPoolExecutor(jobs, _KillingContext(), _begin, (os.getpid(), nice))


class _KilledProcess(LoneProcess):
    """A process that its pool ends by SIGKILL, if another one of the pool has died.

    NVRTC catches SIGTERM while it compiles, and its handler frees memory. A process that was just allocating would wait
    for itself forever, with a lock of the cache, and the pool would wait for the process.
    """

    def terminate(self) -> None:
        self.kill()


class _KillingContext(LoneContext):
    Process = _KilledProcess  # type: ignore[assignment]


def _begin(parent: int, nice: int) -> None:
    end_with_parent(parent)
    os.nice(nice)
