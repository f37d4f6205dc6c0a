"""Collect the products of a model: merged ones as one, all other linear layers one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from outblas.adapt.module_draft import plan_of
from outblas.adapt.parts import LayerWeight
from outblas.core.errors import UsageError


def check_module(model: Any) -> None:
    """Refuse what is no module of torch.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", "a torch.nn.Module", "load the model and pass it")


def model_weights(model: Any) -> list[LayerWeight]:
    """Return the weights of a model's linear layers, in the order of its modules.

    Layers that :func:`outblas.optimize` merged are one weight. A layer that two modules share counts once.

    Raises:
        UsageError: it is none.
    """
    check_module(model)
    found: list[LayerWeight] = []
    covered: set[int] = set()
    for name, module in model.named_modules():
        plan = plan_of(module)
        if plan is None:
            continue
        for part in plan.parts:
            if part.intact(module):
                found += part.weights(name)
                covered |= {id(layer) for layer in part.layers}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in covered and not _is_empty(module.weight):
            found.append(LayerWeight(name, module.weight, module.bias))
    return found


def _is_empty(weight: Any) -> bool:
    """Return whether a weight has no elements, or no extents before the first call."""
    return nn.parameter.is_lazy(weight) or weight.numel() == 0
