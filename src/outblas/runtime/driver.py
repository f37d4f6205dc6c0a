"""The CUDA driver through cuda.bindings. Every result is checked; errors are DeviceError."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.install_hint import install_hint


@functools.cache
def driver() -> Any:
    """Return the module ``cuda.bindings.driver``.

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
    """Return the value in a driver call's result tuple: None, one value, or a tuple of several.

    Example: ``check("cuCtxGetCurrent", driver().cuCtxGetCurrent())`` returns the context. With a status 0,
    ``(status,)`` gives None, ``(status, 7)`` gives 7 and ``(status, 7, 8)`` gives ``(7, 8)``.

    Args:
        result: (status, values...). The status is an enumeration member, with an int value and ``name``.

    Raises:
        DeviceError: the status is not CUDA_SUCCESS.
    """
    status, *values = result
    if int(status) != 0:
        raise DeviceError(
            f"{call} failed with {status.name} ({int(status)})", "CUDA_SUCCESS", "check the launch and its operands"
        )
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def sticky_error() -> str:
    """Return the name of the error that has made the current context unusable; empty if it is usable or does not exist.

    Such a name is ``CUDA_ERROR_ILLEGAL_ADDRESS``. Without a driver on the machine there is no context, so it is empty.
    After an illegal address, a trap or a device assertion, every further call of the context fails until the process
    ends. Waits for the GPU.

    Raises:
        ToolchainMissing: cuda.bindings is not installed.
    """
    cu = driver()
    try:
        (status,) = cu.cuCtxSynchronize()
    except RuntimeError:  # cuda.bindings finds no libcuda, which it loads at the first call
        return ""
    no_context = (cu.CUresult.CUDA_ERROR_NOT_INITIALIZED, cu.CUresult.CUDA_ERROR_INVALID_CONTEXT)
    return "" if int(status) in (0, *map(int, no_context)) else str(status.name)


def capture_graph(calls: Sequence[Callable[[int], Any]], stream: int) -> Any:
    """Capture calls on a stream (thread-local mode) and return the CUgraph. The caller must destroy it.

    Each function is called once, in order, with the raw ``stream``; its result is ignored and no kernel runs. Example:
    ``capture_graph([call], stream)`` for a :class:`outblas.runtime.launch.KernelCall`.

    Args:
        stream: raw CUstream; not the default stream 0, which cannot be captured.

    Raises:
        DeviceError: a call is not allowed under capture. The stream is usable again. So it is after any other exception
            of a call, which is raised as it is.
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
    """Return a number that identifies the graph capture in progress on a raw stream.

    Returns:
        The capture's id, unique in the process; 0 if nothing is captured; None if the capture has failed or the
            driver does not say.
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
    """Return a new raw stream of the current context; allowed during a graph capture. The stream is never destroyed.

    Raises:
        DeviceError: the driver refuses.
    """
    cu = driver()
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(check("cuStreamCreate", cu.cuStreamCreate(flags)))
    finally:
        check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(before))


def use_primary_context(index: int) -> None:
    """Make the primary context of a CUDA device, which torch uses, current in this thread. The call does not wait.

    Raises:
        DeviceError: there is no such device, or it has no context.
    """
    cu = driver()
    device = check("cuDeviceGet", cu.cuDeviceGet(index))
    check("cuCtxSetCurrent", cu.cuCtxSetCurrent(check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))))


def zero(address: int, nbytes: int, stream: int) -> None:
    """Enqueue a memset to zero of ``nbytes`` at a device address on a raw stream; return at once.

    Raises:
        DeviceError: the driver refused it.
    """
    check("cuMemsetD8Async", driver().cuMemsetD8Async(address, 0, nbytes, stream))
