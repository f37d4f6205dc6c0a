"""Check for the optional package that reads and writes Parquet: recordings, result files and comparisons need it."""

from __future__ import annotations

import importlib

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint


def check_parquet() -> None:
    """Check that Parquet files can be read and written; work that ends in such a file begins with this.

    Raises:
        ToolchainMissing: pyarrow is not installed.
    """
    try:
        importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ToolchainMissing(
            "pyarrow is not installed", "pyarrow, which reads and writes Parquet files", install_hint("tune")
        ) from error
