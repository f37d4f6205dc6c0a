"""Code around a ``forward`` that gives the caller what ``forward`` itself returns.

A residual that a child adds passes that code. So it must neither change the result nor refuse one keyword more.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

#: Decorators that return what they wrap returns, by the module and the name of their inner function.
_DECORATORS = (
    ("transformers.modeling_layers", "forward_with_checkpointing"),  # what GradientCheckpointingLayer wraps around it
    ("transformers.utils.deprecation", "wrapped_func"),  # deprecate_kwarg
)


def returns_what_forward_returns(module: Any) -> bool:
    """Return True if a call of a module gives what the innermost function of its ``forward`` returns.

    Hooks do not count here. A class with a ``__call__`` of its own may do anything, and so may an unknown decorator.

    Args:
        module: a module whose ``forward`` is that of its class.
    """
    if type(module).__call__ not in _calls():
        return False
    function = type(module).forward
    while hasattr(function, "__wrapped__"):
        # functools.wraps replaces the names of the function itself, but neither its globals nor its code
        if (function.__globals__.get("__name__"), function.__code__.co_name) not in _DECORATORS:
            return False
        function = function.__wrapped__
    return True


def _calls() -> list[Any]:
    """Return the ``__call__`` of torch and of transformers' decoder layers; older versions have their own."""
    layers = sys.modules.get("transformers.modeling_layers")
    kinds = (nn.Module, getattr(layers, "GradientCheckpointingLayer", nn.Module))
    return [kind.__call__ for kind in kinds]
