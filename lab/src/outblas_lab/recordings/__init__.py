"""Recorded measurements that stand in for a GPU. The names of this package are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import Recording
    from outblas_lab.recordings.replay import ReplayEvaluator

__all__ = ["Recording", "ReplayEvaluator"]
#: Name -> module that defines it.
_LATER = {"Recording": "recording", "ReplayEvaluator": "replay"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
