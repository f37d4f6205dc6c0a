"""The workspace of a stream while a CUDA graph is captured there: memory of the graph's own pool, which nobody holds.

A graph's kernels write to their workspace at every replay, so it must be nobody else's for as long as the graph lives,
and graphs that may run at once must not share one. That is what torch promises of memory that a capture allocates,
of tensors that died in it, too ("Graph memory management" in torch's notes on CUDA): it comes from the graph's pool,
and a pool's memory is given to captures with the same pool only, whose graphs do not run at the same time.

Within the capture a tensor that died may give its memory to the next one, and to hold it instead is no way out: nobody
tells us that the capture is over, and CUDA graphs of Inductor refuse a pool with anything alive in it of which they do
not know (``torch/_inductor/cudagraph_trees.py``, check_memory_pool). But torch gives freed memory to allocations of
the same stream alone, so a workspace is allocated, and freed at once, on a stream of ours on which nobody else
allocates: a fork of the capture that is joined again and runs nothing. Its memory goes to a later capture's workspace,
in the same pool, or goes with the pool.

Before a kernel first counts there a captured memset zeroes the counters: at the head, so that whatever other graphs of
the pool left there does not matter.
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

#: The only allocator of torch that is known to keep a capture's memory as said above.
ALLOCATOR = "native"
#: Per device and raw stream, ours on which nothing but its workspaces is allocated; as many as it ever needed at once.
#: A stream has its own: a capture within another (a conditional node's body) ends first, and what it had then must not
#: go to a stream of the outer one, which may run at the same time.
_asides: dict[tuple[Any, int], list[Any]] = {}
# Held over Python code, amid which a signal's handler of the same thread may multiply, too.
_lock = threading.RLock()


class CapturedWorkspace(NamedTuple):
    """Memory of a graph's pool, for the calls of one stream in one capture; holds nothing.

    Attributes:
        capture: whose it is. address: 0: none is to be had in this capture. nbytes, device: as of a tensor.
    """

    capture: int
    address: int
    nbytes: int
    device: Any

    def data_ptr(self) -> int:
        return self.address


def from_pool(nbytes: int, device: torch.device | str) -> int:
    """Address of a workspace in the pool of the graph that is captured on torch's current stream, whose counters are
    zero for what is captured on that stream from now on; 0: the capture is not torch's, or its allocator another.

    Raises:
        torch.OutOfMemoryError: as any allocation. DeviceError: the driver refused a call.
    """
    import torch

    if torch.cuda.get_allocator_backend() != ALLOCATOR:
        return 0
    current = torch.cuda.current_stream(device)
    with _lock:
        aside = _free_aside(current)
        aside.wait_stream(current)  # from here on in the capture, so that torch allocates from its pool
    try:
        # On a thread of its own, as workspaces outside of captures: pools and modes of the caller's do not reach it.
        address: int = run_on_own_thread(_allocate_and_free, nbytes, aside)
    finally:
        current.wait_stream(aside)  # a capture ends with every fork joined
    if address:
        zero(address, COUNTERS_BYTES, current.cuda_stream)
    return address


def _free_aside(stream: torch.cuda.Stream) -> Any:
    """A stream of ours for a stream that takes no part in a capture: of two workspaces in one each has its own."""
    import torch

    made = _asides.setdefault((stream.device, stream.cuda_stream), [])
    for aside in made:
        if capture_id(aside.cuda_stream) == 0:
            return aside
    made.append(torch.cuda.ExternalStream(new_stream(), device=stream.device))
    return made[-1]


def _allocate_and_free(nbytes: int, aside: Any) -> int:
    """The address of memory that was a tensor's on the stream; 0 where that is of no private pool."""
    import torch

    with torch.cuda.stream(aside):
        address: int = torch.empty(nbytes, dtype=torch.uint8, device=aside.device).data_ptr()
    return address if _in_a_pool(address) else 0


def _in_a_pool(address: int) -> bool:
    """Whether memory is of a private pool: of captures that torch does not know of, it is not."""
    import torch

    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # an older torch
        segments = torch.cuda.memory_snapshot()
    found = (s for s in segments if s["address"] <= address < s["address"] + s["total_size"])
    return any(tuple(s["segment_pool_id"]) != (0, 0) for s in found)


class CaptureWorkspaces:
    """One workspace per capture and stream of a device: two streams of one capture may run at the same time.

    Args:
        allocator: (bytes, device) -> address in the current capture, 0: none is to be had, as :func:`from_pool`.
    """

    KEPT = 64

    def __init__(self, allocator: Callable[[int, Any], int] = from_pool) -> None:
        self._allocator = allocator
        self._of: dict[int, CapturedWorkspace] = {}  # by raw stream, the last capture's

    def take(self, stream: int, capture: int, nbytes: int, device: torch.device | str) -> CapturedWorkspace | None:
        """At least ``nbytes`` for calls that a capture records of the raw ``stream``, which is current; None: there is
        none. Who needs more gets another: what was captured before goes on with its own. Raises as the allocator."""
        found = self._of.get(stream)
        if found is None or found.capture != capture or (found.address and found.nbytes < nbytes):
            found = CapturedWorkspace(capture, self._allocator(nbytes, device), nbytes, device)
            if len(self._of) >= self.KEPT:
                self._of.clear()  # a capture that is still going on takes another
            self._of[stream] = found
        return found if found.address else None

    def get(self, stream: int, capture: int) -> CapturedWorkspace | None:
        """The workspace of a stream in a capture, None: it has none yet, or there is none to be had."""
        found = self._of.get(stream)
        return found if found is not None and found.capture == capture and found.address else None
