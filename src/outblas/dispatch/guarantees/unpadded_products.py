"""Compiled products without padding: Inductor's setting ``shape_padding`` is off while results are batch-invariant.

Inductor times a product against one with padded extents, and takes the faster. A padded K may be summed in another
order, and what it takes depends on M. So rows would change with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outblas.dispatch.inductor_settings import setting_of_threads

_SETTING = "shape_padding"


class _Off:
    """A stand-in for torch's thread-local setting that is off in every thread. A value that a program sets is lost."""

    def get(self) -> bool:
        return False

    def set(self, value: Any) -> None:
        pass

    def reset(self, token: Any) -> None:
        pass


def switch_padding_off() -> Callable[[], None]:
    """Switch the padding of compiled products off, in all threads; return a function that restores it."""
    from torch._inductor import config

    entry = setting_of_threads(_SETTING)
    if entry is not None:
        own, entry.user_override = entry.user_override, _Off()
        return lambda: setattr(entry, "user_override", own)
    before = getattr(config, _SETTING)
    setattr(config, _SETTING, False)
    return lambda: setattr(config, _SETTING, before)
