"""Memory that weights have left, and that a CUDA graph may still read.

A graph reads weights at the addresses of its capture. torch keeps what a graph has allocated, but not the weights that
it reads. So memory that a weight leaves is kept as long as a graph may live. Torch's allocator knows that: each graph
has a memory pool of its own. Other pools count as those of graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from outblas.dispatch import device_registry

#: Tensors that hold such memory.
_kept: list[Any] = []


def keep_for_graphs(parameters: Iterable[Any]) -> None:
    """Keep the present memory of parameters while a CUDA graph may read it; call it before they move.

    Without graphs nothing is kept, and what was kept before is let go.

    Args:
        parameters: the parameters. Those on other devices than GPUs do not count.
    """
    if _graphs_may_live():
        _kept.extend(one.data for one in parameters if one.device.type == device_registry.DEVICE_TYPE)
    else:
        _kept.clear()


def _graphs_may_live() -> bool:
    """Return False if torch's allocator has no memory pool beside its default one."""
    if not torch.cuda.is_initialized():
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # an allocator that does not know, such as cudaMallocAsync
        return True
    return any(segment.get("segment_pool_id") != (0, 0) for segment in segments)
