"""A temporary folder that goes away whatever a stranger's program has put into it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Give a new folder of this user's alone, and remove it in the end with all that is in it.

    Args:
        prefix: what its name begins with.
    """
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path, ignore_errors=True)
        except RecursionError:  # folders in folders, more than Python goes down
            _remove_deep(path)


def _remove_deep(path: str) -> None:
    """Remove a folder by bringing each folder in it up to its top first."""
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
