"""Checks of linear layers: is a layer untouched, so that its product may be computed in another place?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def is_plain(linear: Any) -> bool:
    """Return True if a call of the layer only computes torch's product: no hook, wrapper or subclass."""
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def why_not_plain(linear: Any) -> str:
    """Return in words why a layer is left alone; empty if it is plain and has ordinary weights."""
    kind = type(linear)
    if kind is not nn.Linear:
        return f"is a {kind.__module__}.{kind.__qualname__}, no nn.Linear"
    if not is_plain(linear):
        return "has hooks, or a forward of its own"
    for weight in (linear.weight, linear.bias):
        if weight is None:
            continue
        if type(weight) is not nn.Parameter or weight.layout != torch.strided or weight.is_meta:
            return f"has a weight of {type(weight).__name__} on {weight.device}"
        if not weight.is_floating_point():
            return f"has a weight of {weight.dtype}"
    return ""


def why_not_joined(linears: Sequence[Any]) -> str:
    """Return in words why the weights of some plain layers cannot lie in one matrix; empty if they can."""
    first = linears[0]
    for one in linears[1:]:
        if one.in_features != first.in_features:
            return f"{first.in_features} and {one.in_features} inputs"
        if (one.weight.dtype, one.weight.device) != (first.weight.dtype, first.weight.device):
            return "weights of different dtypes or devices"
        if (one.bias is None) != (first.bias is None):
            return "only some have a bias"
    weights = [id(weight) for one in linears for weight in (one.weight, one.bias) if weight is not None]
    return "they share a weight" if len(set(weights)) < len(weights) else ""


def is_inactive_dropout(module: Any) -> bool:
    """Return True for a dropout that changes nothing outside of training, or an identity."""
    return type(module) in (nn.Dropout, nn.Identity)


def is_observed(module: Any) -> bool:
    """Return True if hooks see the inputs or outputs of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_untouched(module: Any) -> bool:
    """Return True if a call of a module runs the ``forward`` of its class and nothing else."""
    return "forward" not in module.__dict__ and not is_observed(module)
