"""Ctrl-C while a loop of asyncio runs: the same under each supported Python."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_interruptible(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine as ``asyncio.run`` does since Python 3.11, and return its result.

    The first Ctrl-C cancels the coroutine, which tidies up. A second one ends the loop at once. Python 3.10 ends the
    loop at the first one already, in the middle of any task.

    Args:
        main: coroutine that was not awaited yet.

    Raises:
        KeyboardInterrupt: the user interrupted.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if sys.version_info >= (3, 11) or not on_main_thread:
        return asyncio.run(main)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(main)
    return _run_cancelled_by_ctrl_c(main)


def _run_cancelled_by_ctrl_c(main: Coroutine[Any, Any, _T]) -> _T:
    presses = 0

    async def guarded() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int, frame: FrameType | None) -> None:
            nonlocal presses
            presses += 1
            if presses > 1 or task.done():
                raise KeyboardInterrupt
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits

        signal.signal(signal.SIGINT, cancel)
        try:
            return await main
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if presses:
            raise KeyboardInterrupt from None
        raise
