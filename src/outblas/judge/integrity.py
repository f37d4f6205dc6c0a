"""Detect a candidate that has tampered with the clock or the proof, as a Python callable could.

The names of the judging modules are compared with a snapshot from before the candidate was bound. A candidate of CUDA
source alone cannot reach them; it is sandboxed for other reasons.
"""

from __future__ import annotations

import sys
from operator import is_
from typing import Any

from outblas.core import stats
from outblas.judge import (
    gpu_clock,
    operands,
    proof_context,
    proof_inputs,
    reference,
    request_clock,
    rules,
    stream_clock,
    trials,
)
from outblas.runtime import driver

#: Modules of others whose callables measure or judge, where they are loaded.
_FOREIGN = ("builtins", "time", "torch", "torch.cuda", "torch.cuda.streams", "cuda.bindings.driver", "numpy")
#: Our own, imported here: a candidate could otherwise be the first to load the clock, and patch it.
_OWN = (
    *(driver, request_clock, operands, reference, proof_context, proof_inputs, rules, stats, gpu_clock),
    *(stream_clock, trials),
)
#: Names of all watched modules. The gates, which import this module, add their own (:func:`watch`).
WATCHED_MODULES = [*_FOREIGN, *(module.__name__ for module in _OWN)]
#: Of a large foreign module only these names.
_NAMES = {
    "time": ("perf_counter", "perf_counter_ns", "monotonic", "time"),
    "torch": (
        *("Tensor", "aminmax", "cat", "empty", "empty_like", "equal", "full_like", "isnan", "isneginf", "isposinf"),
        *("maximum", "nan_to_num", "stack", "sub", "sum", "where", "zeros"),
    ),
    "torch.cuda": ("Event", "Stream", "synchronize", "stream", "_sleep", "memory_stats_as_nested_dict", "mem_get_info"),
    "torch.cuda.streams": ("Event", "Stream"),
    "numpy": ("median", "percentile", "asarray"),
}


#: Of a type that no assignment can change, as C's are.
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9

Snapshot = dict[str, dict[str, Any]]


def watch(module: str) -> None:
    """Watch one more module of ours: append its ``__name__`` to :data:`WATCHED_MODULES`, unless it is there already.

    Args:
        module: e.g. ``"outblas.judge.gates"``. One that is not loaded yet is skipped until it is.
    """
    if module not in WATCHED_MODULES:
        WATCHED_MODULES.append(module)


def snapshot() -> Snapshot:
    """Return the namespaces of the watched modules that are loaded, and of their classes that can be changed.

    It takes about 1 ms. Pass the result to :func:`tampered` later.

    Returns:
        ``module`` or ``module.class`` -> {name: object}, a copy. Of time, torch and numpy it holds only the few names
            that judging uses; of the other modules, all.
    """
    found: Snapshot = {}
    for name in WATCHED_MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        names = _NAMES.get(name)
        space = dict(vars(module)) if names is None else {key: getattr(module, key, None) for key in names}
        found[name] = space
        for key, value in space.items():
            if isinstance(value, type) and (names or value.__module__ == name) and _can_change(value):
                found[f"{name}.{key}"] = dict(vars(value))
    return found


def tampered(before: Snapshot) -> str:
    """Return the first name of the snapshot that now holds another object, e.g. ``"time.perf_counter"``.

    Empty if none changed. Objects are compared by identity. Compared are callables, and numbers and strings of modules.
    None, lists and dictionaries may change. A new name may appear, unless it is a builtin's name in a module, or a
    callable or property in a class.
    """
    now = snapshot()
    for place, names in before.items():
        space, module = now.get(place, {}), place in WATCHED_MODULES
        if _identical(names, space):
            continue
        for key, value in names.items():
            if space.get(key, _MISSING) is not value and (_acts(value) or (module and isinstance(value, _SETTLED))):
                return f"{place}.{key}"
        for key, value in space.items():
            if key not in names and (key in before["builtins"] if module else _acts(value)):
                return f"{place}.{key}"
    return ""


_MISSING = object()
_SETTLED = (int, float, str)


def _identical(names: dict[str, Any], space: dict[str, Any]) -> bool:
    """Return True if both have the same names with the same objects in the same order.

    Objects are compared by identity, because a candidate's ``==`` could lie.
    """
    return len(names) == len(space) and all(map(is_, names, space)) and all(map(is_, names.values(), space.values()))


def _acts(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _can_change(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE and not kind.__flags__ & _IMMUTABLE_TYPE)
