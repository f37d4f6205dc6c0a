"""Workspaces: global memory in which the parts of a split K are summed, or that a cuBLASLt algorithm uses.

See geometry.workspace_bytes and epilogue/workspace_reduce.cuh. cuBLASLt does not touch the counters at the head. Calls
that may run at the same time need separate workspaces. Calls that run one after the other on one stream may share one,
whatever their kernels and problems. A cuBLASLt call launches several kernels that pass sums on in its workspace. If
another thread could launch between them on the same stream, they need memory of their own, or a lock. Each kernel
leaves the counters at zero. Under programmatic dependent launch, a
kernel writes to it only after its predecessor has ended. Calls captured in a CUDA graph use other workspaces
(:mod:`outblas.runtime.workspace`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.errors import DeviceError
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.driver import capture_id, new_stream, zero

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
            f"a workspace of {nbytes} bytes is needed during graph capture",
            "a workspace allocated before the capture",
            "bind the call before the capture",
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
