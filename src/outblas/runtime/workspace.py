"""Workspaces: global memory in which the parts of a split K are summed, or that a cuBLASLt algorithm uses.

See geometry.workspace_bytes and epilogue/workspace_reduce.cuh. cuBLASLt does not touch the counters at the head. Calls
that may run at the same time need separate workspaces. Calls that run one after the other on one stream may share one,
whatever their kernels and problems. A cuBLASLt call launches several kernels that pass sums on in its workspace. If
another thread could launch between them on the same stream, they need memory of their own, or a lock. Each kernel
leaves the counters at zero. Under programmatic dependent launch, a
kernel writes to it only after its predecessor has ended. Calls captured in a CUDA graph use other workspaces
(:mod:`outblas.runtime.graph_workspace`).
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
    """Return a workspace: uint8[nbytes] on a CUDA device, with zeroed counters, ready for any stream.

    The counters are its first 64 KiB; the rest is not set. Example: ``allocate(1 << 20, "cuda:0")``.
    It is allocated on a separate thread. The caller's thread may allocate from a temporary pool, as while Inductor
    warms up a CUDA graph (``torch/_inductor/cudagraph_trees.py``, CUDAWarmupNode).

    Raises:
        DeviceError: a graph is being captured on the current stream; the memory would belong to the graph.
        torch.OutOfMemoryError: no memory.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"a workspace of {nbytes} bytes is needed while a graph is captured",
            "one that was made before",
            "bind the call before the capture begins",
        )
    workspace: torch.Tensor = run_on_own_thread(zeroed, nbytes, device)
    workspace.record_stream(torch.cuda.current_stream(workspace.device))  # calls may still use it when it is freed
    return workspace


def run_on_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs on a separate thread, or raise its exception.

    The caller waits. ``run_on_own_thread(max, 1, 2)`` returns 2.
    During interpreter exit no thread can be started (as in handlers of :mod:`atexit`); the function then runs on this
    one.
    """
    with ThreadPoolExecutor(1) as threads:
        try:
            done = threads.submit(function, *arguments)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            return function(*arguments)
        return done.result()


def zeroed(nbytes: int, device: torch.device | str) -> Any:
    """Return a workspace as :func:`allocate` does, but from this thread; wait for the current stream.

    Args:
        nbytes: its size, at least 64 KiB.
    """
    import torch

    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    workspace[:COUNTERS_BYTES].zero_()
    torch.cuda.current_stream(workspace.device).synchronize()
    return workspace


def scratch(nbytes: int, device: torch.device | str) -> Any:
    """Return a workspace for one cuBLASLt call: uint8[nbytes], not set, for the device's current stream.

    Drop it once the call is enqueued. torch gives the memory to later calls of the stream only.

    Raises:
        torch.OutOfMemoryError: no memory.
    """
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class StreamWorkspaces:
    """The workspaces of one device, one per stream, kept and used again. :meth:`take` makes one if needed, :meth:`get`
    never.

    A stream that needs more gets a larger one. Calls bound to the smaller one keep it alive and go on with it.

    Args:
        allocator: function (bytes, device) -> workspace.
    """

    def __init__(self, allocator: Any = allocate) -> None:
        self._allocator = allocator
        self._of: dict[int, Any] = {}

    def take(self, stream: int, nbytes: int, device: torch.device | str) -> Any:
        """Return a workspace of at least ``nbytes`` for calls on the raw ``stream``, a uint8 tensor.

        After ``take(stream, 2048, device)``, ``take(stream, 1024, device)`` returns the same tensor. Raises as
        :func:`allocate`.
        """
        found = self._of.get(stream)
        if found is None or found.numel() < nbytes:
            found = self._of[stream] = self._allocator(nbytes, device)
        return found

    def get(self, stream: int) -> Any:
        """Return the stream's workspace; None if it has none yet."""
        return self._of.get(stream)
