"""Everything that is kept on disk: stores, libraries and result files, with their provenance.

The names of this package are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas.records.library import Library

__all__ = ["Library"]
#: Name -> module that defines it.
_LATER = {"Library": "library"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
