"""The CUDA driver through cuda.bindings: every result checked, one error class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.install_hint import install_hint


@functools.cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``.

    Raises:
        ToolchainMissing: it is not installed.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise ToolchainMissing(
            f"cuda.bindings cannot be loaded ({error})", "the cuda-bindings wheel", install_hint("compile")
        ) from error
    return bindings


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call's result tuple (None, one value, or a tuple of several).

    Raises:
        DeviceError: the status is not CUDA_SUCCESS.
    """
    status, *values = result
    if int(status) != 0:
        raise DeviceError(
            f"{call} failed with {status.name} ({int(status)})", "CUDA_SUCCESS", "look at the launch and its operands"
        )
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def sticky_error() -> str:
    """Name of the error that has made this context unusable; empty when it is sound, or there is none yet.

    After an illegal address, a trap or a device assertion every further call of the context fails
    until the process ends.
    """
    cu = driver()
    (status,) = cu.cuCtxSynchronize()
    no_context = (cu.CUresult.CUDA_ERROR_NOT_INITIALIZED, cu.CUresult.CUDA_ERROR_INVALID_CONTEXT)
    return "" if int(status) in (0, *map(int, no_context)) else str(status.name)


def capture_graph(calls: Sequence[Callable[[int], Any]], stream: int) -> Any:
    """Capture the calls on a stream (thread-local mode); the CUgraph is the caller's to destroy.

    Raises:
        DeviceError: something in them is not allowed under capture; the stream is usable again.
    """
    cu = driver()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream, mode))
    try:
        for call in calls:
            call(stream)
    except BaseException:
        status, graph = cu.cuStreamEndCapture(stream)
        if int(status) == 0 and graph is not None:
            cu.cuGraphDestroy(graph)
        raise
    return check("cuStreamEndCapture", cu.cuStreamEndCapture(stream))


def capture_id(stream: int) -> int | None:
    """The capture that records a raw stream, by a number that no other capture of the process has.

    0: none. None: one that has failed, or the driver does not say.
    """
    cu = driver()
    status, kind, number, *_ = cu.cuStreamGetCaptureInfo(stream)
    if int(status) != 0:
        return None
    kinds = cu.CUstreamCaptureStatus
    if kind == kinds.CU_STREAM_CAPTURE_STATUS_NONE:
        return 0
    return int(number) or None if kind == kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE else None


def new_stream() -> int:
    """A raw stream of the current context, made also while a graph is captured; it is never destroyed.

    Raises:
        DeviceError: the driver makes none.
    """
    cu = driver()
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(check("cuStreamCreate", cu.cuStreamCreate(flags)))
    finally:
        check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(before))


def zero(address: int, nbytes: int, stream: int) -> None:
    """Enqueue zeros to device memory on a raw stream. Raises DeviceError."""
    check("cuMemsetD8Async", driver().cuMemsetD8Async(address, 0, nbytes, stream))
