"""Read on/off switches from environment variables."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Return whether a variable is set to 1, true, yes or on (any case). Unset means False."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def is_off(name: str) -> bool:
    """Return whether a variable is set to 0, false, no or off (any case). Unset means False."""
    return os.environ.get(name, "").lower() in ("0", "false", "no", "off")
