"""Inductor's settings of a thread, which torch has from 2.13 on."""

from __future__ import annotations

from typing import Any


def setting_of_threads(name: str) -> Any:
    """Return the place of a setting that each thread has of its own; None: the setting is the whole process's.

    Its attribute ``user_override`` is a context variable, or a stand-in of this package with the same methods. The
    default beside it cannot hold an object: torch copies it into each thread that reads it, and the copy would stay.

    Args:
        name: of the setting, e.g. ``shape_padding``.
    """
    from torch._inductor import config

    entry = getattr(config, "_config", {}).get(name)
    own = getattr(entry, "user_override", None)
    return entry if hasattr(own, "get") and hasattr(own, "reset") else None
