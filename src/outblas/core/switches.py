"""Read on/off switches from environment variables."""

from __future__ import annotations

import functools
import os
import warnings

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def is_on(name: str) -> bool:
    """Return True if an environment variable is set to 1, true, yes or on (any case).

    Unset, empty and any other text give False, also one with spaces around it. A text that is no word for on or off
    gives a RuntimeWarning, once.
    """
    return _word(name) in _ON


def is_off(name: str) -> bool:
    """Return True if an environment variable is set to 0, false, no or off (any case).

    Other texts give False, as for :func:`is_on`.
    """
    return _word(name) in _OFF


def _word(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        return ""
    word = text.lower()
    if word not in _ON and word not in _OFF:
        _warn(name, text)
    return word


@functools.cache
def _warn(name: str, text: str) -> None:
    warnings.warn(f"{name} is {text!r} and has no effect: expected 1 or 0", RuntimeWarning, stacklevel=4)
