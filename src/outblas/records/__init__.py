"""Everything that is kept on disk: stores, libraries and result files, with their provenance.

The names of this package are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.core import first_use

if TYPE_CHECKING:
    from outblas.records.library import Library

__all__ = ["Library"]
__getattr__, __dir__ = first_use.names_on_first_use(__name__, {"Library": "library"})
