"""Problems shared by the GPUs of a host: each GPU has a thread, and takes the next problem when it is free."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from outblas.core.problem import Problem

#: Opened for a GPU's index; yields a function that times one problem and returns the entry of its journal.
Station = Callable[[int], AbstractContextManager[Callable[[Problem], dict[str, Any]]]]


def entries_of_gpus(todo: Sequence[Problem], gpus: Sequence[int], station: Station) -> Iterator[dict[str, Any]]:
    """Yield the entries of problems as they finish, in no fixed order.

    Args:
        station: opened once for each GPU, in that GPU's thread.

    Raises:
        Exception: a station raised it. What the others had finished is yielded before.
    """
    work: queue.SimpleQueue[Problem] = queue.SimpleQueue()
    for problem in todo:
        work.put(problem)
    results: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def serve(index: int) -> None:
        try:
            with station(index) as entry_of:
                while not stop.is_set():
                    try:
                        problem = work.get_nowait()
                    except queue.Empty:
                        break
                    results.put(entry_of(problem))
            results.put(None)
        except BaseException as error:  # handed to the main thread, which raises it
            results.put(error)

    threads = [threading.Thread(target=serve, args=(index,), daemon=True) for index in gpus]
    for thread in threads:
        thread.start()

    def end() -> None:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)

    try:
        running = len(threads)
        while running:
            item = results.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                end()
                yield from _finished(results)
                raise item
            else:
                yield item
    finally:
        end()


def _finished(results: queue.SimpleQueue[dict[str, Any] | BaseException | None]) -> Iterator[dict[str, Any]]:
    """Yield the results that the other GPUs finished after one GPU had failed; a resumed run then keeps them."""
    while not results.empty():
        item = results.get()
        if isinstance(item, dict):
            yield item
