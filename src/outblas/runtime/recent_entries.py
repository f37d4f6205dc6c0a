"""Ordered dicts of a limited size, in which the least recently used entry goes first."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def touch(kept: OrderedDict[_K, _V], key: _K) -> None:
    """Make an entry the most recently used; a signal's handler may have pushed it out since it was found."""
    with contextlib.suppress(KeyError):
        kept.move_to_end(key)


def keep(kept: OrderedDict[_K, _V], key: _K, value: _V, limit: int) -> None:
    """Add an entry; beyond ``limit`` entries the least recently used goes."""
    kept[key] = value
    if len(kept) > limit:
        kept.popitem(last=False)
