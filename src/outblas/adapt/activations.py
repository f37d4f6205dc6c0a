"""Recognise activations by their values, not by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch.linear_operands import ActivationName, apply_activation

#: Largest difference in fp64, relative to the larger of 1 and the value: other spellings of one formula differ less.
_TOLERANCE = 1e-12
_NAMES: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")


def activation_of(function: Callable[[Any], Any]) -> ActivationName | None:
    """Return the activation that a function computes, to 1e-12 in fp64 from -40 to 40; None if it is another one.

    Example: transformers' ``NewGELUActivation`` gives ``"gelu_tanh"``, and its ``QuickGELUActivation`` None.

    Args:
        function: takes and returns a tensor; called with 4001 numbers on the CPU.
    """
    x = torch.linspace(-40, 40, 4001, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            y = function(x.clone())
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return None  # a function of something else is no activation
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for name in _NAMES:
        wanted = apply_activation(x, name)
        if bool(((y - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1)).all()):
            return name
    return None
