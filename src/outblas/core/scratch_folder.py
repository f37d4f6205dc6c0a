"""A temporary folder that is always removed, however deeply an untrusted program nests folders in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Make a temporary folder that only this user can access; remove it with its content when the ``with`` block ends.

    Args:
        prefix: start of the folder's name, e.g. ``outblas-``; a random rest follows.

    Yields:
        The absolute path, a string. The folder is empty. It lies in the system's folder for temporary files.
    """
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield path
    finally:
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
