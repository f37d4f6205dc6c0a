"""The workspace of a free kernel, between guards that are looked at after every proof."""

from __future__ import annotations

from typing import Any

from outblas.operands import CANARY

_GUARD_BYTES = 64 * 1024
_ALIGN = 256


class GuardedWorkspace:
    """``nbytes`` of device memory, zero at first, between two guards.

    Args:
        device: a torch device.
    """

    def __init__(self, nbytes: int, device: Any) -> None:
        import torch

        self.nbytes = nbytes
        room = -(-nbytes // _ALIGN) * _ALIGN
        self._words = torch.full(((room + 2 * _GUARD_BYTES) // 2,), CANARY, dtype=torch.int16, device=device)
        self._first = _GUARD_BYTES // 2
        self._behind = self._first + -(-nbytes // 2)
        self._words[self._first : self._behind] = 0
        torch.cuda.synchronize(device) if self._words.is_cuda else None

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 256."""
        return int(self._words.data_ptr()) + _GUARD_BYTES

    def broken(self) -> bool:
        """Whether a guard was written."""
        guards = (self._words[: self._first], self._words[self._behind :])
        return any(bool((guard != CANARY).any()) for guard in guards)
