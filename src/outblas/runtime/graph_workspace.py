"""Workspaces for kernels that are captured in a CUDA graph. Their memory is in the graph's own pool, and nothing holds
it.

A graph's kernels write to their workspace at every replay. So the workspace must be reserved for as long as the graph
lives. Graphs that may run at the same time must not share one. torch guarantees this for memory that a capture
allocates, even for tensors freed during the capture. See "Graph memory management" in torch's notes on CUDA.
Such memory comes from the graph's pool. A pool's memory goes only to captures with the same pool, and their graphs
never run at the same time.

Within the capture, the memory of a freed tensor may be given to the next one. Keeping the tensor alive is no solution:
nothing reports the end of the capture. Inductor's CUDA graphs also refuse a pool with live memory that they do not know
(``torch/_inductor/cudagraph_trees.py``, check_memory_pool). But torch gives freed memory only to allocations of the
same stream. So a workspace is allocated, and freed at once, on a private stream on which nothing else allocates. That
stream is a fork of the capture that is joined again and runs nothing. Its memory goes to a later capture's workspace in
the same pool, or is released with the pool.

Before the first kernel, a captured memset zeroes the counters at the head. So data that other graphs of the pool left
there do not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.driver import capture_id, new_stream, zero
from outblas.runtime.workspace import run_on_own_thread

if TYPE_CHECKING:
    import torch

#: The only allocator of torch that is known to keep a capture's memory as described above.
ALLOCATOR = "native"
#: (device, raw stream) -> private streams on which only its workspaces are allocated. The list grows to the largest
#: number needed at once. Streams do not share them: a capture within another (the body of a conditional node) ends
#: first. Its memory must not go to a stream of the outer capture that may run at the same time.
_asides: dict[tuple[Any, int], list[Any]] = {}
# Reentrant: a signal handler may multiply while this thread holds the lock.
_lock = threading.RLock()


class CapturedWorkspace(NamedTuple):
    """Memory of a graph's pool, for the calls of one stream in one capture. It does not keep the memory alive.

    :meth:`CaptureWorkspaces.take` makes it; pass it as ``workspace`` to
    :meth:`outblas.runtime.launch.LoadedKernel.bind`.

    Attributes:
        address: device address; 0 if this capture can have no workspace.
        nbytes: size, bytes.
    """

    capture: int
    address: int
    nbytes: int
    device: Any

    def data_ptr(self) -> int:
        """Return the address, as a tensor's method of this name does."""
        return self.address


def from_pool(nbytes: int, device: torch.device | str) -> int:
    """Return the address of a workspace in the pool of the graph that is captured on torch's current stream.

    Its counters are zero for everything that is captured on that stream from now on.

    Args:
        nbytes: size, bytes.

    Returns:
        The address; 0 if torch did not begin the capture, or uses another allocator than :data:`ALLOCATOR`.

    Raises:
        torch.OutOfMemoryError: no memory.
        DeviceError: the driver refused a call.
    """
    import torch

    if torch.cuda.get_allocator_backend() != ALLOCATOR:
        return 0
    current = torch.cuda.current_stream(device)
    with _lock:
        aside = _free_aside(current)
        aside.wait_stream(current)  # joins the capture, so that torch allocates from its pool
    try:
        # On a separate thread, so that pools and modes of the caller do not apply.
        address: int = run_on_own_thread(_allocate_and_free, nbytes, aside)
    finally:
        current.wait_stream(aside)  # every fork must be joined before a capture ends
    if address:
        zero(address, COUNTERS_BYTES, current.cuda_stream)
    return address


def _free_aside(stream: torch.cuda.Stream) -> Any:
    """Return a private stream for ``stream`` that takes part in no capture; make one if all do."""
    import torch

    made = _asides.setdefault((stream.device, stream.cuda_stream), [])
    for aside in made:
        if capture_id(aside.cuda_stream) == 0:
            return aside
    made.append(torch.cuda.ExternalStream(new_stream(), device=stream.device))
    return made[-1]


def _allocate_and_free(nbytes: int, aside: Any) -> int:
    """Return the address of memory that was allocated and freed on the stream; 0 if it is not in a private pool."""
    import torch

    with torch.cuda.stream(aside):
        address: int = torch.empty(nbytes, dtype=torch.uint8, device=aside.device).data_ptr()
    return address if _in_a_pool(address) else 0


def _in_a_pool(address: int) -> bool:
    """Return whether memory is in a private pool. It is not if torch does not know of the capture."""
    import torch

    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # older torch
        segments = torch.cuda.memory_snapshot()
    found = (s for s in segments if s["address"] <= address < s["address"] + s["total_size"])
    return any(tuple(s["segment_pool_id"]) != (0, 0) for s in found)


class CaptureWorkspaces:
    """The workspaces of one device by capture and stream. Streams do not share: two of one capture may run at the same
    time.

    :meth:`take` returns a workspace and makes it if needed; :meth:`get` makes none. Nothing is freed by the caller.

    Args:
        allocator: function (bytes, device) -> address in the current capture, 0 if impossible; see :func:`from_pool`.
    """

    KEPT = 64

    def __init__(self, allocator: Callable[[int, Any], int] = from_pool) -> None:
        self._allocator = allocator
        self._of: dict[int, CapturedWorkspace] = {}  # raw stream -> workspace of its latest capture

    def take(self, stream: int, capture: int, nbytes: int, device: torch.device | str) -> CapturedWorkspace | None:
        """Return a workspace of at least ``nbytes`` for a capture; None if it can have none.

        A second call of the same stream and capture returns the same one if it is large enough. A call that needs more
        gets another workspace; calls captured before keep theirs. Raises as the allocator.

        Args:
            stream: raw stream that is captured; must be torch's current stream.
            capture: id of the capture, from :func:`outblas.runtime.driver.capture_id`.
            nbytes: size, bytes.
        """
        found = self._of.get(stream)
        if found is None or found.capture != capture or (found.address and found.nbytes < nbytes):
            found = CapturedWorkspace(capture, self._allocator(nbytes, device), nbytes, device)
            if len(self._of) >= self.KEPT:
                self._of.clear()  # a capture in progress then takes another workspace
            self._of[stream] = found
        return found if found.address else None

    def get(self, stream: int, capture: int) -> CapturedWorkspace | None:
        """Return the workspace of a stream in a capture; None if it has none."""
        found = self._of.get(stream)
        return found if found is not None and found.capture == capture and found.address else None
