"""Torch's products with fp32 sums only: its switches of reduced precision are off while somebody needs that.

Torch reads the switches when it calls cuBLAS (``at::globalContext()`` in ``CUDABlas.cpp``), and they are of the whole
process. Meanwhile other threads' products are accurate, too. Users are counted: the first one switches off, and the
last one restores. So no thread restores a switch that another one still needs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

#: torch's switches that let partial sums of a split K be added in the operands' dtype; torch's default is on.
REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
#: torch's switch that accumulates in fp16, from 2.7 on; its default is off.
FP16_ACCUMULATION = "allow_fp16_accumulation"

_lock = threading.RLock()
_users = 0
_before: dict[str, Any] = {}


def reduction_switches() -> dict[str, bool]:
    """Return the present value of each of torch's two switches of reduced precision.

    Example: torch's defaults are ``{"allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True}``.
    """
    import torch

    return {name: bool(getattr(torch.backends.cuda.matmul, name)) for name in REDUCTIONS}


@contextlib.contextmanager
def full_precision_reductions() -> Iterator[None]:
    """Keep torch's products at fp32 sums while the context lasts. Yield None.

    Contexts may be nested and overlap in several threads. A value that a program sets meanwhile is lost at the end.
    """
    begin_full_precision()
    try:
        yield
    finally:
        end_full_precision()


def begin_full_precision() -> None:
    """Add a user of full precision; the first one switches torch's reduced precision off."""
    global _users
    import torch

    with _lock:
        if _users == 0:
            settings = torch.backends.cuda.matmul
            _before.update({name: _value(settings, name) for name in REDUCTIONS})
            for name in REDUCTIONS:
                before = _before[name]
                setattr(settings, name, (False, before[1]) if isinstance(before, tuple) else False)
            if hasattr(settings, FP16_ACCUMULATION):
                _before[FP16_ACCUMULATION] = settings.allow_fp16_accumulation
                settings.allow_fp16_accumulation = False
        _users += 1


def end_full_precision() -> None:
    """Remove a user of full precision; the last one restores torch's switches."""
    global _users
    import torch

    with _lock:
        _users -= 1
        if _users == 0:
            for name, value in _before.items():
                setattr(torch.backends.cuda.matmul, name, value)
            _before.clear()


def _value(settings: Any, name: str) -> Any:
    """Return a switch as torch takes it back: with its leave to split K, if this torch has one."""
    reduced, split = bool(getattr(settings, name)), getattr(settings, f"{name}_split_k", None)
    return reduced if split is None else (reduced, bool(split))
