"""torch's threads in a training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread within the ``with`` block, and its former number after it.

    The networks are small: more threads wait for each other. The result then depends on no number of threads, either.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
