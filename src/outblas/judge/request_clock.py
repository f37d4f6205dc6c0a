"""The clock of server mode: times of single requests, taken in C (``csrc/request_clock.c``), the same for every entry.

For each request it waits for the arrival, makes one call, and polls the stream (cuStreamQuery) until that call has
completed. It reads CLOCK_MONOTONIC at the begin of the call and at the completion. A request that arrives while another
is served starts late, so its latency counts from its arrival.

The clock's own share is one query of an idle stream and the call of a Python function, see :func:`clock_us`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.rivals import BaselineCall, CallFromC
from outblas.runtime import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Columns of the times that the extension returns.
_ARRIVAL, _CALLED, _COMPLETED = range(3)


class RequestTimes(NamedTuple):
    """Times of some requests, in their order.

    Attributes:
        latency_us: float64[requests], from the arrival to the completion, microseconds: as a user sees it.
        service_us: float64[requests], from the begin of the call to the completion, microseconds.
    """

    latency_us: NDArray[np.float64]
    service_us: NDArray[np.float64]


def require_clock() -> Any:
    """Return the extension's clock, ``serve_requests``.

    Raises:
        ToolchainMissing: the extension is not built, or was built from other sources.
    """
    reason = native.why_not_built()
    if reason:
        raise ToolchainMissing(f"server mode cannot time requests: {reason}", "the C extension", native.BUILD)
    return native.extension().serve_requests


def serve_requests(
    calls: Sequence[BaselineCall | CallFromC], stream: int, arrivals_ns: Sequence[int], libcuda: str = native.LIBCUDA
) -> RequestTimes:
    """Serve one request after the other on a stream, and return their times.

    The interpreter is free for other threads until 50 microseconds before an arrival, and taken from there to the
    completion.

    Args:
        calls: bound calls; request i uses number ``i % len(calls)``. At least one.
        arrivals_ns: arrival of each request, nanoseconds after the first moment, rising.

    Raises:
        UsageError: there are no calls, or arrivals fall or are below 0.
        DeviceError: a call or the stream failed, or a request took more than 30 seconds.
        ToolchainMissing: the extension is not built.
    """
    due = np.asarray(arrivals_ns, dtype=np.int64)
    if not len(calls) or (due.size and (due[0] < 0 or (np.diff(due) < 0).any())):
        raise UsageError(
            f"{len(calls)} calls have arrivals at {list(arrivals_ns)[:3]} ns",
            "one or more calls, and ascending arrival times of 0 or more",
            "correct the calls or the arrival times",
        )
    clock = require_clock()
    words = tuple(call[:3] if isinstance(call, CallFromC) else call for call in calls)
    found = clock(libcuda, stream, words, array("q", due.tolist()).tobytes(), native.raise_refused)
    times = np.frombuffer(found, dtype=np.int64).reshape(-1, 3)
    begun, completed = times[:, _CALLED], times[:, _COMPLETED]
    return RequestTimes((completed - times[:, _ARRIVAL]) / 1e3, (completed - begun) / 1e3)


def clock_us(stream: int, arrivals_ns: Sequence[int], libcuda: str = native.LIBCUDA) -> float:
    """Return the clock's own share of a latency: the median, in microseconds, of requests that call an empty function.

    Args:
        stream: raw CUstream, which must be idle.

    Raises:
        DeviceError: as :func:`serve_requests`.
        ToolchainMissing: as :func:`serve_requests`.
    """
    return float(np.median(serve_requests([lambda stream: None], stream, arrivals_ns, libcuda).latency_us))
