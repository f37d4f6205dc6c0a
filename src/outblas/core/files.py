"""Write files atomically, and lock files and folders between processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.plain_files import open_lock

#: Seconds for which a process waits for its turn at a shared file, at most. A turn is one read or one line.
TURN_SECONDS = 1.0

#: Lock file in a run's folder; held by the process that works there.
FOLDER_LOCK = ".driver.lock"


def user_data_folder(kind: str) -> Path:
    """Return the user's folder for one kind of data: ``$XDG_DATA_HOME/outblas/<kind>``. It need not exist.

    Without that variable it is ``~/.local/share/outblas/<kind>``.
    """
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(data, "outblas", kind)


def try_folder(folder: Path) -> None:
    """Make a folder and write a file in it, which leaves nothing; return None.

    Raises:
        OSError: the folder cannot be made, or takes no file.
    """
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"outblas")
        file.flush()


def write_atomic(path: Path, data: bytes) -> Path:
    """Write a file so that other processes see the old content or the new one, never a part; return ``path``.

    The data go to a temporary file beside ``path``, are synced, and the file is renamed. Missing parent folders are
    made.

    Args:
        path: file to write or replace, a ``Path`` and not a string.

    Raises:
        RecordError: the disk refuses (no space, no permission). The old file at ``path`` is kept, and the temporary
            file is removed.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)  # left by a killed process with the same pid
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        wrong, do = f"cannot write {path}: {error.strerror or error}", "free some space or pass another path"
        raise RecordError(wrong, f"a writable path with {len(data)} bytes of free space", do) from error
    return path


def is_unfinished(path: Path, name: str) -> bool:
    """Return True if ``path`` is named as a temporary file of :func:`write_atomic` for a file called ``name``.

    Only the name of ``path`` counts: it starts with ``.NAME.`` and ends in ``.tmp``. The file need not exist.

    Example: ``is_unfinished(Path("runs/.run.json.12.tmp"), "run.json")`` is True.
    """
    return path.name.startswith(f".{name}.") and path.suffix == ".tmp"


def write_json(path: Path, data: Any) -> Path:
    """Write the bytes of :func:`json_text` to a file by :func:`write_atomic`. Return ``path``.

    Raises:
        RecordError: the disk refuses. The old file at ``path`` is kept.
        UsageError: ``data`` has a NaN or an infinity. Nothing is written.
        TypeError: ``data`` has a value that JSON does not know, e.g. a set. Nothing is written.
    """
    return write_atomic(path, json_text(data))


def json_text(data: Any) -> bytes:
    """Return data as JSON bytes: indented by one space, one value a line, newline at the end.

    Keys keep their order. Characters outside ASCII become escapes such as ``\\u00e9``. Example:
    ``json_text({"a": [1]})`` returns ``b'{\\n "a": [\\n  1\\n ]\\n}\\n'``.

    Raises:
        UsageError: there is a NaN or an infinity, which only some readers of JSON know. The message says where.
        TypeError: there is a value that JSON does not know, e.g. a set.
    """
    try:
        return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()
    except ValueError as error:
        found = "" if "Circular" in str(error) else _odd_number(data, "data")
        raise UsageError(found or f"invalid JSON: {error}", "finite numbers", "use None for a missing value") from error


def _odd_number(data: Any, place: str) -> str:
    """Return the first NaN or infinity of JSON values as text, e.g. ``data['a'][0] is nan``; empty without one."""
    if isinstance(data, float):
        return "" if math.isfinite(data) else f"{place} is {data}"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        inner = data.items()
    elif isinstance(data, (list, tuple)):
        inner = enumerate(data)
    return next(filter(None, (_odd_number(value, f"{place}[{key!r}]") for key, value in inner)), "")


def lock_file(file: IO[bytes], what: str) -> None:
    """Lock an open file without waiting; return None. Others can still read it.

    The lock ends when the file is closed or the process ends. On a file system without locks nothing happens.

    Args:
        file: an open file. A second lock through the same object changes nothing.
        what: name of the file for the error text, which starts ``{what} is in use by``.

    Raises:
        RecordError: another process holds the lock, or this process does through another open file. The message has the
            pid if the system reports it. Or the file was deleted.
    """
    by, held = "another process", try_to_lock(file)
    if held is None or (held and os.fstat(file.fileno()).st_nlink):
        return  # without a link, the former holder has just deleted the file
    if not held:
        pid = _locked_by(file)
        by += "" if pid is None else f" (pid {pid})"
    raise RecordError(f"{what} is in use by {by}", "one process at a time", "wait until it ends, or pass another path")


@contextlib.contextmanager
def in_turn(file: IO[bytes]) -> Iterator[None]:
    """Hold the lock of an open file for a block; wait for it, but not for long.

    A process that holds it for longer than :data:`TURN_SECONDS` is stuck, or keeps the file to itself
    (:func:`lock_file`). The block then goes on without the lock, and so does one on a file system without locks.

    Args:
        file: an open file that this process has not locked by :func:`lock_file`, whose lock would end with the block.
    """
    end = time.monotonic() + TURN_SECONDS
    while (held := try_to_lock(file)) is False and time.monotonic() < end:
        time.sleep(TURN_SECONDS / 100)
    try:
        yield
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


def try_to_lock(file: IO[bytes] | int) -> bool | None:
    """Lock an open file without waiting; return True if it is locked now.

    Args:
        file: an open file, or the descriptor of a file or folder.

    Returns:
        False if another open file holds the lock; None if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _locked_by(file: IO[bytes]) -> int | None:
    """Return the pid of the process that holds the lock of an open file; None if /proc/locks does not say."""
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
    """Lock a run's folder for this process until the ``with`` block ends; make the folder if it is missing.

    It does not wait. The lock is the file ``.driver.lock`` in the folder; the file stays.

    Raises:
        RecordError: another process, or this one in an outer ``with`` block, holds the lock. Or the folder cannot be
            written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / FOLDER_LOCK)
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be written ({error.strerror})", "a writable directory", "pass another --run"
        ) from error
    with file:
        lock_file(file, str(folder))
        yield


@contextlib.contextmanager
def lock_run_folder(folder: Path, name: str = "run.json") -> Iterator[None]:
    """Lock a folder by :func:`lock_folder` if it is missing, empty, or belongs to a run.

    A folder belongs to a run if it holds the file ``name``, whatever else it holds. It counts as empty if it holds only
    the lock file and unfinished copies of ``name``. The file ``name`` itself is not made.

    Raises:
        UsageError: the folder holds other files and no file ``name``, is no folder, or its name is no UTF-8.
        RecordError: as :func:`lock_folder`, or the folder cannot be read.
    """

    def ours(file: Path) -> bool:  # files that a run makes before the file called name
        return file.name == FOLDER_LOCK or is_unfinished(file, name)

    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # the name goes into the store and into reports
        raise UsageError(
            f"path {ascii(str(folder))} is not valid UTF-8", "a UTF-8 path", "pass another --run"
        ) from error
    try:
        is_run = (folder / name).exists() or not folder.exists()
        if not is_run and not (folder.is_dir() and all(map(ours, folder.iterdir()))):
            wrong = f"{folder} exists but is not a run directory"
            raise UsageError(wrong, "a new or empty directory", "pass another --run")
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be read ({error.strerror})", "a readable directory", "pass another --run"
        ) from error
    with lock_folder(folder):
        yield


@contextlib.contextmanager
def lock_for_update(path: Path, do: str) -> Iterator[None]:
    """Hold a lock for a read-modify-write of ``path``; wait until it is free.

    It excludes other processes and other threads, so that concurrent additions to the file are not lost. The lock is
    the file ``.NAME.lock`` beside ``path``; it stays. ``path`` itself is neither read nor made. A nested call for the
    same path never returns.

    Args:
        path: file to update; its folder is made if missing.

    Raises:
        RecordError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise RecordError(f"cannot write to {path.parent} ({error.strerror})", "a writable directory", do) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
