"""Work of the first of several training processes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Own = TypeVar("Own")
Done = TypeVar("Done")


def on_first_process(own: Sequence[Own], work: Callable[[list[Own]], list[Done]]) -> list[Done]:
    """Do work on the items of all processes in the first process, and return this process its share.

    Every process must call it, with equally many items. An error of the work is raised in all processes.

    Args:
        own: items of this process; they are pickled.
        work: makes one result of each item, in order; only the first process calls it.
    """
    from accelerate.state import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    state = PartialState()
    everyone: list[Own] = gather_object(list(own))
    shared: list[Any] = [None]
    if state.is_main_process:
        try:
            shared = [work(everyone)]
        except Exception as error:  # the other processes wait: they must hear of it, and end as well
            shared = [error]
    broadcast_object_list(shared)
    (found,) = shared
    if isinstance(found, Exception):
        raise found
    start = state.process_index * len(own)
    done: list[Done] = found[start : start + len(own)]
    return done
