"""Files that are published whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def is_unfinished(path: Path, name: str) -> bool:
    """Whether ``path`` is what :func:`write_atomic` of a file ``name`` left behind when it was killed."""
    return path.name.startswith(f".{name}.") and path.suffix == ".tmp"


def write_json(path: Path, data: Any) -> Path:
    """Write a JSON file, a value on each line, whole or not at all; raises as :func:`write_atomic`."""
    return write_atomic(path, json_text(data))


def json_text(data: Any) -> bytes:
    """How our JSON files are written."""
    return (json.dumps(data, indent=1) + "\n").encode()


@contextlib.contextmanager
def sole_driver(lock: Path) -> Iterator[None]:
    """A run's folder for this process alone, until the block ends; another one is refused at once. The lock is a file,
    which stays.

    Raises:
        RecordError: another process has it, or the folder cannot be written.
    """
    path = lock.parent
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = lock.open("wb")
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror})", "a writable folder", "choose another --run"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(f"{path} is in use by another process", "one driver per run", "wait for it") from error
        yield


@contextlib.contextmanager
def alone(path: Path, do: str) -> Iterator[None]:
    """One at a time, of all processes and threads, between reading ``path`` and writing it again: so that two that add
    to it both leave what is theirs. The lock is a file beside it, which stays.

    Raises:
        RecordError: the folder cannot be written to; it ends with ``do``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("wb")
    except OSError as error:
        raise RecordError(f"cannot write to {path.parent} ({error.strerror})", "a writable folder", do) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
