"""Let ``save_pretrained`` of an optimised model save contiguous weights, as safetensors demands.

Rows of gate and up lie by turns in memory. So ``save_pretrained`` of this instance gets a state dict with copies.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

#: The method, and its argument with the tensors to save.
METHOD, STATE = "save_pretrained", "state_dict"
#: Attribute of the method that :func:`save_contiguously` sets.
_OURS = "outblas_saves"


def save_contiguously(model: Any) -> None:
    """Replace ``save_pretrained`` of a module and of those inside, if it takes a state dict; return None.

    Args:
        model: any module. A method that was replaced on the instance is left alone.
    """
    for module in model.modules():
        original = getattr(type(module), METHOD, None)
        own = module.__dict__.get(METHOD)  # an unpickled module may have that of its class
        if not inspect.isfunction(original) or (own is not None and getattr(own, "__func__", None) is not original):
            continue
        signature = inspect.signature(original)
        if STATE in signature.parameters:
            setattr(module, METHOD, types.MethodType(_saver(original, signature), module))


def save_as_before(model: Any) -> None:
    """Undo :func:`save_contiguously`; return None."""
    for module in model.modules():
        if hasattr(module.__dict__.get(METHOD), _OURS):
            delattr(module, METHOD)


def contiguous_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose strided tensors are contiguous. Names of one tensor have one copy.

    Args:
        state: name -> tensor, or any other value, which is kept.
    """
    copies: dict[tuple[Any, ...], Any] = {}

    def contiguous(value: Any) -> Any:
        if not _needs_copy(value):
            return value
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if place not in copies:
            copies[place] = value.contiguous()
        return copies[place]

    return {name: contiguous(value) for name, value in state.items()}


def _needs_copy(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_contiguous()


def _saver(original: Any, signature: inspect.Signature) -> Any:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        state = given.arguments.get(STATE)
        state = self.state_dict() if state is None else state
        if any(map(_needs_copy, state.values())):
            given.arguments[STATE] = contiguous_tensors(state)
        return original(*given.args, **given.kwargs)

    setattr(save_pretrained, _OURS, True)
    return save_pretrained
