"""Modules whose code writes to no tensor that they are given."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections.abc import Callable
from typing import Any

from outblas.adapt.dataflow import Dataflow, Step
from outblas.core.errors import UsageError


def keeps_its_inputs(module: Any) -> bool:
    """Return True if no code of a module and its children changes a tensor in place, as far as the code shows.

    Modules of ``torch.nn`` say it by their attribute ``inplace``. The ``forward`` of others must be readable, and may
    call children, methods, and functions of torch and Python.
    """
    return all(_is_harmless(one) for one in module.modules())


def _is_harmless(module: Any) -> bool:
    if getattr(module, "inplace", False):
        return False
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return True
    return "forward" not in module.__dict__ and _has_harmless_code(inspect.unwrap(kind.forward))


@functools.lru_cache(maxsize=256)
def _has_harmless_code(forward: Callable[..., Any]) -> bool:
    try:
        flow = Dataflow(forward)  # which refuses methods and statements that change something in place
    except UsageError:
        return False
    return all(_is_harmless_call(flow, step) for step in flow.steps if flow.keys[step.value][0] == "call")


def _is_harmless_call(flow: Dataflow, call: Step) -> bool:
    if any(word.arg in (None, "inplace", "out") for word in call.node.keywords):
        return False
    function = flow.keys[call.value][2]
    if not flow.is_global(function):
        return isinstance(call.node.func, ast.Attribute)
    found = flow.global_object(function)
    if found is None:
        return isinstance(call.node.func, ast.Name) and hasattr(builtins, call.node.func.id)
    name = str(getattr(found, "__name__", "_"))
    return str(getattr(found, "__module__", "")).partition(".")[0] == "torch" and not name.endswith("_")
