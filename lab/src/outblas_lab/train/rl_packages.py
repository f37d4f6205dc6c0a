"""torch, sb3-contrib and Stable-Baselines3 for trainings: their names, or one error if a package is missing."""

from __future__ import annotations

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint

try:
    import torch
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
except ImportError as error:
    raise ToolchainMissing(f"{error.name} is not installed", "torch and sb3-contrib", install_hint("rl")) from error

__all__ = ["BaseCallback", "DummyVecEnv", "MaskablePPO", "VecMonitor", "torch"]
