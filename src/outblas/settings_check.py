"""Whether what is there was begun with the settings that are asked for now: figures of two kinds are never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.errors import UsageError


def check_same_settings(what: str, was: Mapping[str, Any], wanted: Mapping[str, Any], do: str) -> None:
    """Compare as JSON reads back: no tuples, no integers for keys.

    Args:
        what: the beginning of what was wrong, ``runs/a holds a run with other settings``. do: what to do about it.

    Raises:
        UsageError: a key is missing on one side or has another value; it names them, and what they were.
    """
    odd = sorted(key for key in {*was, *wanted} if was.get(key) != wanted.get(key))
    if odd:
        raise UsageError(f"{what} ({', '.join(odd)})", ", ".join(f"{key}={was.get(key)!r}" for key in odd), do)
