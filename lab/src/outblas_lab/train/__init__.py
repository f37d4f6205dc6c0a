"""Learning across shapes: the regressor, the policy and their training (torch, stable-baselines3).

A trained policy needs none of these packages: ``outblas_lab.train.policy`` and ``outblas.predict.posterior`` run it
with numpy alone. Each name of this package is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.core import first_use

if TYPE_CHECKING:
    from outblas_lab.train.env import TuningEnv
    from outblas_lab.train.policy import Policy

__all__ = ["Policy", "TuningEnv"]
__getattr__, __dir__ = first_use.names_on_first_use(__name__, {"Policy": "policy", "TuningEnv": "env"})
