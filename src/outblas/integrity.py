"""Whether a candidate has tampered with the clock or the proof: a Python callable could.

What judges a candidate is compared, name by name, with what it was before the candidate was bound.
Candidates that are CUDA source only cannot reach it; those are sandboxed for other reasons.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

#: Modules whose callables measure or judge.
WATCHED = (
    "time",
    "torch.cuda",
    "torch.cuda.streams",
    "cuda.bindings.driver",
    "numpy",
    "outblas.driver",
    "outblas.latency",
    "outblas.operands",
    "outblas.oracle",
    "outblas.rules",
    "outblas.stats",
    "outblas.timing",
    "outblas.verify",
)
#: Of a large foreign module only these names.
_NAMES = {
    "time": ("perf_counter", "perf_counter_ns", "monotonic", "time"),
    "torch.cuda": ("Event", "Stream", "synchronize", "stream", "_sleep", "memory_stats", "mem_get_info"),
    "torch.cuda.streams": ("Event", "Stream"),
    "numpy": ("median", "percentile", "asarray"),
}


def snapshot() -> dict[str, Any]:
    """``module.name`` (and ``module.class.name``) -> object, of our own watched modules and the others loaded.

    Our own are loaded here: a candidate could otherwise be the first to load the clock, and patch it.
    """
    found: dict[str, Any] = {}
    for name in WATCHED:
        module = importlib.import_module(name) if name.startswith("outblas.") else sys.modules.get(name)
        if module is None:
            continue
        for key in _NAMES.get(name, tuple(vars(module))):
            value = getattr(module, key, None)
            if not callable(value) and not isinstance(value, (int, float, str)):
                continue
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and (name in _NAMES or value.__module__ == name):
                found.update({f"{name}.{key}.{k}": v for k, v in vars(value).items() if callable(v)})
    return found


def tampered(before: dict[str, Any]) -> str:
    """First name of the snapshot that is another object now, empty if none is."""
    now = snapshot()
    for name, value in before.items():
        if name not in now or now[name] is not value:
            return name
    return ""
