"""Read regular files only; from caches, read only files that nobody but their user or root can have written.

A read of a pipe or a device could block for ever. On a shared machine, another user could plant code in a cache. So a
cached file counts only if this user or root owns it, and others cannot write to it.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from outblas.core.errors import RecordError

_ROOT = 0
#: Larger files are refused: no file of this package is that large. Bytes.
_MOST_BYTES = 4 << 30
#: Errors of :mod:`zipfile` at a damaged archive whose members are all stored or deflated.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, EOFError, LookupError, NotImplementedError, OSError, OverflowError, RuntimeError,
    ValueError,
)  # fmt: skip


class NotOursError(OSError):
    """A file or folder that another user owns or may change, or that is no regular file. It is an OSError."""


def read_plain_file(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file. A symbolic link is followed.

    Args:
        most: number of bytes to read from its start, at most; a longer file is no error. None: the whole file.

    Raises:
        FileNotFoundError: the file is missing.
        NotOursError: it is no regular file (a pipe, a device, a folder). This is an OSError.
        OSError: it cannot be read, or is larger than 4 GiB (only if ``most`` is None).
    """
    return _read(_open(path, os.O_RDONLY), path, most)


def read_json(path: Path) -> Any:
    """Return the parsed value of a JSON file.

    Raises:
        OSError: as :func:`read_plain_file`, e.g. FileNotFoundError.
        ValueError: the content is no UTF-8, no JSON (an empty file is none), or nested too deeply.
    """
    try:
        return json.loads(read_plain_file(path).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(path: Path, expected: str, do: str, **fields: object) -> dict[str, Any]:
    """Return the object of a JSON file.

    Args:
        fields: values that the object must have, e.g. ``format=2``.

    Raises:
        RecordError: the file is missing, cannot be read, holds no JSON object, or a field has another value.
    """
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        for name, value in fields.items():
            if found.get(name) != value:
                raise ValueError(f"its {name} is {found.get(name)!r}")
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read ({error})", expected, do) from error
    return found


def open_zip(data: bytes) -> zipfile.ZipFile:
    """Open a ZIP archive in memory; the caller closes it.

    Raises:
        Exception: one of :data:`ZIP_ERRORS`, which its methods may raise, too. It is ValueError for a member that is
            neither stored nor deflated: each other method has errors of its own.
    """
    packed = zipfile.ZipFile(io.BytesIO(data))
    if any(one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for one in packed.infolist()):
        raise ValueError("a member is neither stored nor deflated")
    return packed


def read_own_file(path: Path) -> bytes:
    """Return the content of a regular file that this user or root owns and others cannot write.

    Write permission of the file's group is allowed.

    Args:
        path: the file. A symbolic link is not followed.

    Raises:
        FileNotFoundError: the file is missing.
        NotOursError: it is a link or no regular file, another user owns it, or others may write to it.
        OSError: it cannot be read.
    """
    handle = _open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _check_owner(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return _read(handle, path)


def open_lock(path: Path) -> IO[bytes]:
    """Open a file for reading and writing, to lock it. Make it if it is missing; keep its content otherwise.

    It does not lock the file. The position is at the start.

    Args:
        path: the file. A symbolic link is not followed.

    Returns:
        The open binary file; the caller closes it.

    Raises:
        NotOursError: it is a link, a pipe or a device. This is an OSError.
        OSError: it is a folder (IsADirectoryError), its folder is missing (FileNotFoundError), or it cannot be opened.
    """
    return os.fdopen(_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b")


def open_plain(path: Path) -> io.FileIO:
    """Open a regular file for unbuffered reading and writing. Make it if it is missing; keep its content otherwise.

    Args:
        path: the file. A symbolic link is followed. Its folder must exist.

    Returns:
        The open file, at its start; the caller closes it.

    Raises:
        OSError: it cannot be opened, or is no regular file: NotOursError for a pipe or a device, IsADirectoryError for
            a folder.
    """
    return io.FileIO(_open(path, os.O_RDWR | os.O_CREAT), "r+")


def check_own_folder(path: Path) -> None:
    """Check that only this user, root and perhaps a group can put files into a folder. Return None if so.

    Args:
        path: an existing folder. A link to a folder is followed.

    Raises:
        NotOursError: another user owns it, or everybody may write to it (as to ``/tmp``). This is an OSError.
        OSError: its status cannot be read; FileNotFoundError if it is missing.
    """
    _check_owner(path, os.stat(path))


def _read(handle: int, path: Path, most: int | None = None) -> bytes:
    """Return the first ``most`` bytes of an open descriptor, or all of it, and close the descriptor."""
    with os.fdopen(handle, "rb") as file:
        if most is not None:
            return file.read(most)
        if (size := os.fstat(handle).st_size) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"has {size} bytes, more than {_MOST_BYTES}", str(path))
        return file.read()  # read(size) would allocate that much memory first


def _open(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file. Opening a pipe does not block; it raises NotOursError."""
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except ValueError as error:
        raise NotOursError(errno.EINVAL, "has a NUL byte in its name", ascii(str(path))) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOursError(error.errno, "is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotOursError(errno.EINVAL, "is not a regular file", str(path))
    return handle


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raise NotOursError if another user than this one or root owns the file, or if everybody may write to it.

    Group write permission is accepted: the user's umask may grant it.
    """
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise NotOursError(errno.EPERM, f"belongs to another user (uid {found.st_uid})", str(path))
    if found.st_mode & stat.S_IWOTH:
        raise NotOursError(errno.EPERM, "is writable by everyone", str(path))
