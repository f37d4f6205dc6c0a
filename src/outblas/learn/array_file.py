"""Named arrays in an .npz file, and the errors by which a damaged one shows itself."""

from __future__ import annotations

import io
import zlib
from typing import Any
from zipfile import BadZipFile

import numpy as np

#: Errors of reading a damaged or crafted file, and of arrays that do not fit each other.
DAMAGED = (
    OSError, ArithmeticError, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError, BadZipFile,
    zlib.error,
)  # fmt: skip


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return name -> array of an .npz file. Nothing in it is unpickled.

    Args:
        data: content of the file.

    Raises:
        Exception: one of :data:`DAMAGED`.
    """
    if not data.startswith(b"PK"):
        raise ValueError("it is no .npz file")  # numpy would take it for a pickle, and propose to trust it
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
