"""Files that are published whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from outblas.errors import RecordError


def write_atomic(path: Path, data: bytes) -> Path:
    """Write and sync a temporary file beside ``path``, then rename it into place.

    Raises:
        RecordError: when the disk refuses it (no space, no right); what was at ``path`` is kept.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}",
            f"a writable path with room for {len(data)} bytes",
            "free some space or choose another path",
        ) from error
    return path
