"""Switches of the environment."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Whether what is off by default was switched on."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def is_off(name: str) -> bool:
    """Whether what is on by default was switched off."""
    return os.environ.get(name, "").lower() in ("0", "false", "no", "off")
