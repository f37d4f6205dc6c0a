"""The workspaces of one GPU: for kernels, for algorithms of cuBLASLt, for calls from C and for captures.

Several threads may multiply on one stream. An algorithm of cuBLASLt launches more than one kernel, so a call of another
thread must not use its memory between them (:mod:`outblas.runtime.workspace`). A kernel of this package is one launch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from outblas.runtime.driver import capture_id
from outblas.runtime.workspace import CapturedWorkspace, CaptureWorkspaces, StreamWorkspaces, scratch

if TYPE_CHECKING:
    import torch

_W = TypeVar("_W")
_LOG = logging.getLogger(__name__)


class DeviceWorkspaces:
    """Hands out workspaces. Capturing streams get memory of their graph."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held over Python code, amid which a signal's handler may multiply, too
        self._of_kernels, self._lent, self._captured = StreamWorkspaces(), StreamWorkspaces(), CaptureWorkspaces()

    def take(
        self,
        stream: int,
        nbytes: int,
        device: torch.device,
        capturing: Callable[[], bool] = bool,
        of_algorithm: bool = False,
    ) -> torch.Tensor | CapturedWorkspace | None:
        """Return the workspace for a call from Python; None without memory, or if the capture can have none.

        Args:
            stream: raw stream, which is the current stream of torch.
            nbytes: its size, at least.
            capturing: returns True if the stream captures a graph.
            of_algorithm: the call is one of cuBLASLt, whose workspace must be dropped once it is enqueued.
        """
        capture = capture_id(stream) if capturing() else 0
        if capture == 0 and of_algorithm:
            return _if_memory_is_left(lambda: scratch(nbytes, device))
        with self._lock:
            if capture == 0:
                return _if_memory_is_left(lambda: self._of_kernels.take(stream, nbytes, device))
            return None if capture is None else self._captured.take(stream, capture, nbytes, device)

    def to_lend(
        self, stream: int, nbytes: int, device: torch.device, capturing: Callable[[], bool] = bool
    ) -> tuple[torch.Tensor | CapturedWorkspace | None, int]:
        """Return the workspace for calls from C, which locks it over each call, and the id of the stream's capture.

        The arguments are those of :meth:`take`.

        Returns:
            (workspace, or None without memory or if the capture has none; id of the capture in progress, or 0).
        """
        capture = capture_id(stream) if capturing() else 0
        if capture is None:
            return None, 0
        with self._lock:
            if capture == 0:
                return _if_memory_is_left(lambda: self._lent.take(stream, nbytes, device)), 0
            return self._captured.get(stream, capture), capture


def _if_memory_is_left(make: Callable[[], _W]) -> _W | None:
    """Return what a function makes; None if the GPU's memory is full. torch then computes the product."""
    import torch

    try:
        return make()
    except torch.cuda.OutOfMemoryError as error:
        _LOG.info("not enough memory for a workspace: %s", str(error).partition("\n")[0])
        return None
