"""Named arrays in an .npz file, and the errors by which a damaged one shows itself."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from outblas.core.plain_files import ZIP_ERRORS, open_zip

#: Errors of reading a damaged or crafted file, and of arrays that do not fit each other.
DAMAGED = (*ZIP_ERRORS, ArithmeticError, TypeError, MemoryError)
#: Most bytes of the arrays of a file together. The packaged ones have less than a megabyte.
_MOST_BYTES = 256 << 20


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return name -> array of an .npz file. Nothing in it is unpickled.

    Args:
        data: content of the file.

    Raises:
        Exception: one of :data:`DAMAGED`. It is ValueError if the arrays have more than 256 MiB.
    """
    if not data.startswith(b"PK"):
        raise ValueError("it is no .npz file")  # numpy would take it for a pickle, and propose to trust it
    with open_zip(data) as packed:
        size = sum(member.file_size for member in packed.infolist())  # zipfile unpacks at most this
    if size > _MOST_BYTES:
        raise ValueError(f"it unpacks to {size >> 20} MiB, at most {_MOST_BYTES >> 20} are read")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def single(arrays: Mapping[str, Any], name: str) -> Any:
    """Return the one number or text of an array without dimensions.

    ``int`` and ``float`` refuse ``[[1.0]]`` since NumPy 2.5 alone.

    Args:
        arrays: name -> array, or a scalar of NumPy.
        name: key in it.

    Raises:
        KeyError: there is no such array.
        ValueError: it has dimensions.
    """
    array = arrays[name]
    if array.ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions, not 0")
    return array.item()
