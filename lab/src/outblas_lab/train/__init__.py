"""Learning across shapes: the regressor, the policy and their training (torch, stable-baselines3).

A trained policy needs none of these packages: ``outblas_lab.train.policy`` and ``outblas.predict.posterior`` run it
with numpy alone. Each name of this package is imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas_lab.train.env import TuningEnv
    from outblas_lab.train.policy import Policy

__all__ = ["Policy", "TuningEnv"]
#: Public name -> the module that defines it.
_LATER = {"Policy": "policy", "TuningEnv": "env"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
