"""Limits on the host's memory and disk for a worker that runs strangers' code, watched from outside."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

#: Entries of a worker's folder that are counted; a folder with more is over its limit.
_MOST_ENTRIES = 10_000
_BLOCK = 512  # of st_blocks, whatever the file system's own is


@dataclass(frozen=True)
class HostLimits:
    """Limits on a worker's use of the host. Its driver looks every second.

    Attributes:
        memory_bytes: host memory, files in memory included.
        folder: the worker's own folder; None: none is watched.
        folder_bytes: bytes on the disk beneath that folder.
    """

    memory_bytes: int
    folder: str | None = None
    folder_bytes: int = 4 << 30

    def why_over(self, pid: int | None) -> str:
        """Return the limit that a process has passed, in words; empty if it keeps all.

        Args:
            pid: the process; None: one that has ended.
        """
        if (used := resident_bytes(pid) + memory_file_bytes(pid)) > self.memory_bytes:
            return f"it filled {_mib(used)} MiB of host memory, at most {self.memory_bytes >> 20}"
        if self.folder is None:
            return ""
        used, entries = folder_usage(self.folder)
        if used > self.folder_bytes or entries > _MOST_ENTRIES:
            return f"it filled {_mib(used)} MiB of disk with {entries} files, at most {self.folder_bytes >> 20}"
        return ""


def _mib(used: int) -> int:
    """Return bytes in MiB, rounded up, so that a use above a limit does not read as the limit."""
    return -(-used >> 20)


def resident_bytes(pid: int | None) -> int:
    """Return the resident host memory of a process in bytes, e.g. 290308096; 0 for None, or if it is not known."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_file_bytes(pid: int | None) -> int:
    """Return the bytes of the files in memory (``memfd``) that a process has open; 0 if they are not known.

    A file that is open several times counts once.
    """
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path).startswith("/memfd:"):
                    state = os.stat(entry.path)
                    found[state.st_ino] = state.st_blocks * _BLOCK
    return sum(found.values())


def folder_usage(folder: str) -> tuple[int, int]:
    """Return (bytes on the disk, entries) beneath a folder. The count ends after the most entries allowed.

    No link is followed. Entries that vanish meanwhile do not count.
    """
    used, entries, waiting = 0, 0, [folder]
    while waiting and entries <= _MOST_ENTRIES:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                if entries > _MOST_ENTRIES:
                    break
                with contextlib.suppress(OSError):
                    used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return used, entries
