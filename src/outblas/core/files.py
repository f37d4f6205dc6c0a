"""Files that are published whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.plain_files import open_lock

#: File in a run's folder that the process holds which works there.
FOLDER_LOCK = ".driver.lock"


def write_atomic(path: Path, data: bytes) -> Path:
    """Write and sync a temporary file beside ``path``, then rename it into place.

    Raises:
        RecordError: when the disk refuses it (no space, no right); what was at ``path`` is kept.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)  # of a process that had our number and was killed
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
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


def lock_file(file: IO[bytes], what: str) -> None:
    """An open file for this process, until it is closed or the process ends, however it ends. Reading is left to all.
    Where the file system has no locks, nothing is done.

    Raises:
        RecordError: another process has it, named where the system tells; ``what`` is the beginning of what was wrong.
    """
    by = "another process"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return  # else who had it has just removed it
    except BlockingIOError:
        pid = _locked_by(file)
        by += "" if pid is None else f" (pid {pid})"
    except OSError:
        return
    raise RecordError(f"{what} is in use by {by}", "one process at a time", "wait for it, or choose another path")


def _locked_by(file: IO[bytes]) -> int | None:
    """Which process has an open file for itself; None where /proc/locks does not tell."""
    about = os.fstat(file.fileno())
    which = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():  # 1: FLOCK ADVISORY WRITE pid device:inode 0 EOF
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [which] and int(words[4]) > 0:
                return int(words[4])
    return None


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A run's folder, made where it is missing, for this process alone, until the block ends; another one is refused at
    once. The lock is a file in it, which stays.

    Raises:
        RecordError: another process has it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / FOLDER_LOCK)
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be written ({error.strerror})", "a writable folder", "choose another --run"
        ) from error
    with file:
        lock_file(file, str(folder))
        yield


@contextlib.contextmanager
def lock_run_folder(folder: Path, name: str = "run.json") -> Iterator[None]:
    """The same, of a folder that is missing, empty or a run's, which the file ``name`` says.

    Raises:
        UsageError: something else is there. RecordError: as :func:`lock_folder`, or it cannot be read.
    """

    def ours(file: Path) -> bool:  # what a run has before its first file has its name
        return file.name == FOLDER_LOCK or is_unfinished(file, name)

    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # its name goes into the store and into reports
        raise UsageError(
            f"the name {ascii(str(folder))} is no UTF-8", "a name that is", "choose another --run"
        ) from error
    try:
        is_run = (folder / name).exists() or not folder.exists()
        if not is_run and not (folder.is_dir() and all(map(ours, folder.iterdir()))):
            raise UsageError(f"{folder} is there and is no run", "a new or empty directory", "choose another --run")
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be read ({error.strerror})", "a readable folder", "choose another --run"
        ) from error
    with lock_folder(folder):
        yield


@contextlib.contextmanager
def lock_for_update(path: Path, do: str) -> Iterator[None]:
    """One at a time, of all processes and threads, between reading ``path`` and writing it again: so that two that add
    to it both leave what is theirs. The lock is a file beside it, which stays.

    Raises:
        RecordError: the folder cannot be written to; it ends with ``do``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise RecordError(f"cannot write to {path.parent} ({error.strerror})", "a writable folder", do) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
