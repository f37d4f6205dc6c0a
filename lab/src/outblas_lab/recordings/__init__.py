"""Recorded measurements that stand in for a GPU. The names of this package are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.core import first_use

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import Recording
    from outblas_lab.recordings.replay import ReplayEvaluator

__all__ = ["Recording", "ReplayEvaluator"]
__getattr__, __dir__ = first_use.names_on_first_use(__name__, {"Recording": "recording", "ReplayEvaluator": "replay"})
