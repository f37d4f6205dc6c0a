"""The contract of recorded measurements that stand in for a GPU; outblas-lab reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu


class RecordedDevice(Protocol):
    """Measurements of one GPU that answer in its place."""

    @property
    def gpu(self) -> Gpu:
        """Return the GPU that was measured."""

    @property
    def problems(self) -> Sequence[Problem]:
        """Return the recorded problems."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Return the origin of the figures."""

    def row(self, problem: Problem) -> int:
        """Return the place of a problem; raise UsageError if it was not recorded."""

    def best_baseline(self, problem: Problem) -> tuple[str, float]:
        """Return the name of the fastest baseline of a problem, and its microseconds."""
