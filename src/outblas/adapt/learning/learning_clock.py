"""The clock of the thread that learns: it keeps the interpreter's lock while it records events.

A call of ``cuda.bindings`` gives that lock up. Beside a busy program the thread then waits for it, some ten
microseconds each time. Meanwhile the GPU runs out of queued work, and the round is spoiled. Events take a microsecond
and never wait for the GPU, so the lock can stay.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from outblas.core.errors import DeviceError
from outblas.judge.stream_clock import StreamClock

#: CUresult of an event that has not happened yet.
_NOT_READY = 600


class LearningClock(StreamClock):
    """A :class:`outblas.judge.stream_clock.StreamClock` for a thread beside a program that is busy in Python.

    Use it with its stream as torch's current one: to set that takes longer than the rest of a plug.
    """

    def _plug(self, cycles: int) -> None:
        import torch

        torch.cuda._sleep(cycles)

    def _record(self, event: Any) -> None:
        status = locked_driver().cuEventRecord(ctypes.c_void_p(int(event)), ctypes.c_void_p(self.stream))
        if status:
            raise DeviceError(f"cuEventRecord failed with {status}", "CUDA_SUCCESS", "look at the launch before it")

    def _is_pending(self, event: Any) -> bool:
        return bool(locked_driver().cuEventQuery(ctypes.c_void_p(int(event))) == _NOT_READY)


@functools.cache
def locked_driver() -> Any:
    """Return the CUDA driver, whose calls keep the interpreter's lock. Only calls that never wait may use it.

    Raises:
        DeviceError: there is no driver.
    """
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"libcuda.so.1 cannot be loaded ({error})", "a driver of NVIDIA", "install it") from error
