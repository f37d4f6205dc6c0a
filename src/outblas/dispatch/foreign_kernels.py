"""Kernels that other packages have registered for torch's operators, by ``torch.library`` or from C++."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

#: Files of torch's own Python kernels begin so.
TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


def why_not_replaced(name: str, key: str) -> str:
    """Return in one line why a kernel of ``aten::`` must not be replaced; empty if it may.

    torch keeps all kernels of an operator, the newest first. The oldest one is its own. Newer ones of its own, such as
    the Triton kernel of ``aten::bmm`` in torch 2.13, do not count.

    Args:
        name: the operator, such as ``mm``.
    """
    lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
    places = [
        line.partition(": registered at ")[2] for line in lines if line.startswith((f"{key}:", f"{key} (inactive):"))
    ]
    where = next((place.partition(" :: ")[0] for place in places[:-1] if not place.startswith(TORCH_FOLDER)), "")
    if not where and not takes_overrides() and f"aten/{name}/{key}" in torch.library._impls:
        where = "an unknown place"  # torch would raise an error
    text = f"another package has replaced aten::{name} for {key} (at {where}); call outblas.matmul instead"
    return text if where else ""


def takes_overrides() -> bool:
    """Return True if ``torch.library`` has an option to replace a kernel that Python has registered."""
    return "allow_override" in inspect.signature(torch.library.Library.impl).parameters
