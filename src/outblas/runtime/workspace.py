"""Global memory in which the parts of a split K meet (geometry.workspace_bytes, epilogue/workspace_reduce.cuh), or that
an algorithm of cuBLASLt asks for, which leaves the counters at its head alone.

Calls that may run at the same time need workspaces of their own; calls of one stream, one after the other, may share
one, whatever their kernels and problems: its counters are zero again when a kernel ends, and a kernel under
programmatic dependent launch writes to it only after its predecessor has ended. Calls that are captured in a CUDA graph
have others (:mod:`outblas.runtime.graph_workspace`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from outblas.core.errors import DeviceError
from outblas.kernels.geometry_terms import COUNTERS_BYTES

if TYPE_CHECKING:
    import torch


def allocate(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """A workspace: uint8[nbytes] on a CUDA device, ready for any stream (the counters, its head, are zero).

    It is made on a thread of its own: what a caller's thread allocates may go to a pool that is not for keeping, as
    while Inductor warms up a CUDA graph (``torch/_inductor/cudagraph_trees.py``, CUDAWarmupNode).

    Raises:
        DeviceError: a graph is being captured on the current stream; memory made then would be the graph's.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"a workspace of {nbytes} bytes is needed while a graph is captured",
            "one that was made before",
            "bind the call before the capture begins",
        )
    workspace: torch.Tensor = run_on_own_thread(_zeroed, nbytes, device)
    workspace.record_stream(torch.cuda.current_stream(workspace.device))  # whose calls may be under way when it goes
    return workspace


def run_on_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, on a thread of its own; on this one where the interpreter is ending, as in
    handlers of :mod:`atexit`, and starts no threads."""
    with ThreadPoolExecutor(1) as threads:
        try:
            done = threads.submit(function, *arguments)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            return function(*arguments)
        return done.result()


def _zeroed(nbytes: int, device: torch.device | str) -> Any:
    import torch

    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    workspace[:COUNTERS_BYTES].zero_()
    torch.cuda.current_stream(workspace.device).synchronize()
    return workspace


class StreamWorkspaces:
    """One workspace per stream of a device. A stream that needs more gets another; calls that were bound to the
    smaller one keep it alive and go on with it, for they are of the same stream."""

    def __init__(self, allocator: Any = allocate) -> None:
        self._allocator = allocator
        self._of: dict[int, Any] = {}

    def take(self, stream: int, nbytes: int, device: torch.device | str) -> Any:
        """At least ``nbytes`` for calls on the raw ``stream``; raises as :func:`allocate`."""
        found = self._of.get(stream)
        if found is None or found.numel() < nbytes:
            found = self._of[stream] = self._allocator(nbytes, device)
        return found

    def get(self, stream: int) -> Any:
        """The stream's workspace, None: it has none yet."""
        return self._of.get(stream)
