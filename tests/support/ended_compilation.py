"""Compilations that end after the passes over the graph: generated code takes most of the time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest


class Seen(Exception):
    """Raised by the last pass of a test."""


def ends_after_passes(ends: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a compilation must raise :class:`Seen`; with ``ends=False`` one that wants nothing."""
    return pytest.raises(Exception, match="Seen") if ends else contextlib.nullcontext()
