"""Read on/off switches from environment variables."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Return True if an environment variable is set to 1, true, yes or on (any case).

    Unset, empty and any other text give False, also one with spaces around it.

    Args:
        name: name of the variable, e.g. ``OUTBLAS_DISABLE``.
    """
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def is_off(name: str) -> bool:
    """Return True if an environment variable is set to 0, false, no or off (any case).

    Unset, empty and any other text give False, also one with spaces around it.

    Args:
        name: name of the variable, e.g. ``OUTBLAS_NATIVE``.
    """
    return os.environ.get(name, "").lower() in ("0", "false", "no", "off")
