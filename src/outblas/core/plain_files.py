"""Reads plain files only, and from caches those only that nobody but their user can have written.

A pipe or a device in the place of a file would be read for ever. On a shared machine, what other users put into a
cache would run as one's own. So a cached file counts only if it is this user's or root's, who may do everything anyway.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

_ROOT = 0
#: Larger files than this hold none of ours, bytes.
_MOST_BYTES = 4 << 30


class NotOursError(OSError):
    """A file or folder that another user owns or may change, or that is no plain file."""


def read_plain_file(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a plain file. A symbolic link to one is followed.

    Args:
        path: of the file.
        most: how many are wanted; None: all.

    Raises:
        OSError: there is none, it is a pipe, a device or a folder, or it is larger than 4 GiB.
    """
    return _read(_open(path, os.O_RDONLY), path, most)


def read_json(path: Path) -> Any:
    """Return what a plain file of JSON holds.

    Args:
        path: of the file.

    Raises:
        OSError: as :func:`read_plain_file`.
        ValueError: it is no UTF-8, no JSON, or nested too deeply.
    """
    try:
        return json.loads(read_plain_file(path).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_own_file(path: Path) -> bytes:
    """Return the bytes of a plain file that this user or root owns.

    Args:
        path: of the file. A symbolic link is not followed.

    Raises:
        FileNotFoundError: there is none.
        NotOursError: it is a link, no plain file, another user's, or others may write to it.
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
    """Open a file to lock, and make it where it is missing. What it holds stays as it is.

    Args:
        path: of the file. A symbolic link is not followed.

    Raises:
        NotOursError: it is a link or no plain file.
        OSError: it cannot be opened.
    """
    return os.fdopen(_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b")


def open_plain(path: Path) -> io.FileIO:
    """Open a plain file to read and write it without a buffer, and make it where it is missing.

    Args:
        path: of the file. A symbolic link to one is followed.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    return io.FileIO(_open(path, os.O_RDWR | os.O_CREAT), "r+")


def check_own_folder(path: Path) -> None:
    """Check that nobody but this user and root can put files into a folder.

    Args:
        path: of the folder, which exists. A link to a folder counts as the folder.

    Raises:
        NotOursError: it is another user's, or everybody may write to it.
        OSError: it cannot be looked at.
    """
    _check_owner(path, os.stat(path))


def _read(handle: int, path: Path, most: int | None = None) -> bytes:
    """The beginning of an open file, or all of it; it is closed."""
    with os.fdopen(handle, "rb") as file:
        if most is not None:
            return file.read(most)
        if (size := os.fstat(handle).st_size) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {_MOST_BYTES}", str(path))
        return file.read()  # with a number it would take that much memory first


def _open(path: Path, flags: int) -> int:
    """A descriptor of a plain file; a pipe is not waited for."""
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except ValueError as error:
        raise NotOursError(errno.EINVAL, "has a NUL in its name", ascii(str(path))) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOursError(error.errno, "is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotOursError(errno.EINVAL, "is no plain file", str(path))
    return handle


def _check_owner(path: Path, found: os.stat_result) -> None:
    """A group may write where the user says so by umask; everybody may not."""
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise NotOursError(errno.EPERM, f"belongs to another user (uid {found.st_uid})", str(path))
    if found.st_mode & stat.S_IWOTH:
        raise NotOursError(errno.EPERM, "can be written by everybody", str(path))
