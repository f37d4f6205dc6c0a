"""The calls of one side of a round as a CUDA graph, as a program that captures its step runs them.

A gap between two kernels is shorter in a graph. So a product that takes several kernels is slower outside of one, and
another way may win there.
"""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.rivals import BaselineCall
from outblas.judge.gpu_clock import GraphEntry
from outblas.judge.stream_clock import instantiate
from outblas.runtime.driver import check, driver


class RoundGraph(GraphEntry):
    """A graph of calls that run one after the other. Call it to launch them, and ``free`` after use.

    Args:
        calls: the calls; each kind has run before, so that all is loaded.
        stream: raw CUstream on which they are captured, and run.

    Raises:
        DeviceError: the capture fails.
    """

    def __init__(self, calls: Sequence[BaselineCall], stream: int) -> None:
        super().__init__("round", instantiate(calls, stream), calls, len(calls))
        self._stream = stream
        check("cuGraphUpload", driver().cuGraphUpload(self.executable, stream))

    def __call__(self) -> None:
        check("cuGraphLaunch", driver().cuGraphLaunch(self.executable, self._stream))
