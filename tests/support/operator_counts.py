"""Counts the operators of ATen that are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCounts(TorchDispatchMode):
    """Name -> calls of a block, by ``counts``; views are operators, too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
