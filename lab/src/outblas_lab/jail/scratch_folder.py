"""A temporary folder that is always removed, however deeply an untrusted program nests folders in it.

Its process holds a lock on it. So the next such folder can remove those that killed processes have left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from outblas.core.files import try_to_lock

#: Age from which on a folder that nobody has locked counts as left, seconds. A new one is not locked yet.
_LEFT_AFTER_S = 3600.0


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Make a temporary folder that only this user can access; remove it with its content when the ``with`` block ends.

    Folders with the same prefix that killed processes have left for an hour are removed, too.

    Yields:
        The absolute path, a string. The folder is empty. It lies in the system's folder for temporary files.
    """
    _remove_left(prefix)
    path = tempfile.mkdtemp(prefix=prefix)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_to_lock(lock)
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _remove_left(prefix: str) -> None:
    """Remove the user's old folders of a prefix that no process has locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not ours or time.time() - found.st_mtime < _LEFT_AFTER_S:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_to_lock(lock):
                    _remove(str(path))
            finally:
                os.close(lock)


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # nested deeper than Python's recursion limit
        _remove_deep(path)


def _remove_deep(path: str) -> None:
    """Remove a deeply nested folder: first move every subfolder to the top level, then remove them one by one."""
    waiting, count = [path], 0
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    count += 1
                    up = f"{path}/.outblas-{count}"
                    os.rename(entry.path, up)
                    waiting.append(up)
                else:
                    os.unlink(entry.path)
            if folder != path:
                os.rmdir(folder)
    shutil.rmtree(path, ignore_errors=True)
