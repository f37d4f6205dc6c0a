"""Recognise activations by their values, not by their names."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from outblas.adapt.dataflow import Dataflow, Step
from outblas.adapt.plain_linears import is_untouched
from outblas.dispatch.fused_layer import ActivationName, apply_activation

#: Largest difference in fp64, relative to the larger of 1 and the value: other spellings of one formula differ less.
_TOLERANCE = 1e-12
_NAMES: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")


def activation_of_call(module: Any, flow: Dataflow, call: Step) -> ActivationName | None:
    """Return the activation that a call computes: of a child, another attribute, or a function; None if it is none."""
    if len(flow.arguments(call)) != 1:
        return None
    name = flow.called(call)
    if name is not None:
        function = getattr(module, name, None)
        return activation_of(function) if callable(function) and not flow.has_keywords(call) else None
    function = flow.global_object(flow.keys[call.value][2])
    if not callable(function) or isinstance(function, (torch.nn.Module, types.MethodType)):
        return None  # no part would see hooks of a module that is not in the model
    keywords = {word.arg: getattr(word.value, "value", None) for word in call.node.keywords}
    constant = all(isinstance(word.value, ast.Constant) and word.arg for word in call.node.keywords)
    return activation_of(lambda x: function(x, **keywords)) if constant else None


def activation_of(function: Callable[[Any], Any]) -> ActivationName | None:
    """Return the activation that a function computes, to 1e-12 in fp64 from -40 to 40; None if it is another one.

    A module must have neither children nor tensors, and no hook is called. A child could change later, unseen. A method
    of a module must not read the module, for the same reason.

    Example: transformers' ``NewGELUActivation`` gives ``"gelu_tanh"``, and its ``QuickGELUActivation`` None.

    Args:
        function: takes and returns a tensor; called with 4001 numbers on the CPU.
    """
    x = torch.linspace(-40, 40, 4001, dtype=torch.float64, device="cpu")
    try:
        formula = _formula(function)
        with torch.no_grad():
            y = None if formula is None else formula(x.clone())
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return None  # a function of something else is no activation
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for name in _NAMES:
        wanted = apply_activation(x, name)
        if bool(((y - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1)).all()):
            return name
    return None


def _formula(function: Any) -> Callable[[Any], Any] | None:
    """Return what a function computes without hooks; None if what it computes may depend on other modules."""
    if isinstance(function, torch.nn.Module):
        alone = not (function._modules or function._parameters or function._buffers)
        plain = type(function).__call__ is torch.nn.Module.__call__ and is_untouched(function)
        return functools.partial(_outside_of_training, function) if alone and plain else None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        method = getattr(function, "__func__", None)
        return None if method is None else lambda x: method(_Nothing(), x)
    return function  # type: ignore[no-any-return]


def _outside_of_training(module: Any, x: Any) -> Any:
    """Return a module's result in the mode in which rewritten code runs, whatever its mode is now."""
    was, module.training = module.training, False
    try:
        return module.forward(x)
    finally:
        module.training = was


class _Nothing:
    """Stands for a module: a method that reads one raises AttributeError or TypeError."""
