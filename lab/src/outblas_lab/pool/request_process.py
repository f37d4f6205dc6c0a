"""The process that serves requests: this one, or one per GPU.

A clock of server mode holds the interpreter while it serves. Two of one process would wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from outblas.core.child_process import LoneContext, end_with_parent

T = TypeVar("T")
#: Cores of the host for each GPU that serves. One polls for completions; threads of torch and the driver need others.
CORES_PER_GPU = 4


def serving_gpus(gpus: Sequence[int], cores: int | None = None) -> tuple[int, ...]:
    """Return the GPUs that may serve requests at the same time: the first ones, at least one.

    Args:
        gpus: CUDA indices; at least one.
        cores: cores that this process may use; None: as the system says.
    """
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return tuple(gpus[: max(1, usable // CORES_PER_GPU)])


@contextmanager
def caller(alone: bool) -> Iterator[Callable[..., T]]:
    """Yield ``call(function, *arguments)``, which returns what the function does, or raises what it raises.

    Args:
        alone: True calls in this process. False calls in a process of its own, which starts at the first call and ends
            with the block. Function, arguments and result must pickle then.
    """
    if alone:
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, LoneContext(), end_with_parent, (os.getpid(),)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()
