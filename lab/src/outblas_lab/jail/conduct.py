"""Detect changes that host code made to the judging process: a look before it is bound, and one after.

The rules of every candidate (outblas.judge.rules) hold, too. None of this is airtight: the code shares the process.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import zlib
from collections.abc import Mapping

#: Files whose machine code measures or judges, by a part of their name.
_WATCHED = re.compile(r"libcuda\.so|cuda/bindings/.*\.so|\[vdso\]|/libc\.so|/libc-|libpython|/python3")
#: Descriptors that CUDA opens when it likes.
_OWN_FILES = re.compile(r"/dev/(?:nvidia|null|zero|urandom)|/memfd:|/usr/|/sys/|/proc/driver|\.so")
_MOST_BYTES = 256 << 20


def snapshot() -> dict[str, object]:
    """Return the present state of this process that a candidate must not change. Pass it to :func:`what_changed` later.

    Returns:
        A new dictionary of four entries, deed -> state: ``set a timer``, ``handles signals``, ``opened files`` and
        ``changed the code that measures it``. ``opened files`` is a frozenset of paths.
    """
    return {
        "set a timer": tuple(signal.getitimer(which)[0] > 0 for which in (0, 1, 2)),
        "handles signals": _status("SigCgt"),
        "opened files": _files(),
        "changed the code that measures it": _code(),
    }


def what_changed(before: Mapping[str, object]) -> str:
    """Return the first deed since an earlier :func:`snapshot`, in words; "" if nothing changed.

    Example: ``"it opened files (/tmp/x)"`` or ``"it set a timer"``. Only one deed is named. Files that were closed
    since do not count.
    """
    for what, state in snapshot().items():
        was = before[what]
        if what == "opened files":
            more = sorted(state - was)  # type: ignore[operator]
            if more:
                return f"it {what} ({more[0]})"
        elif what == "changed the code that measures it":
            changed = [name for name, crc in state.items() if was.get(name, crc) != crc]  # type: ignore[attr-defined]
            if changed:
                return f"it {what} ({os.path.basename(changed[0][0])})"
        elif state != was:
            return f"it {what}"
    return ""


def _status(key: str) -> str:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((line.split()[1] for line in file if line.startswith(f"{key}:")), "")
    except OSError:
        return ""


def _files() -> frozenset[str]:
    """Targets of the open descriptors, but for those of CUDA."""
    found = []
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("/") and not _OWN_FILES.search(target) and f"/proc/{os.getpid()}/fd" not in target:
            found.append(target)
    return frozenset(found)


def _code() -> dict[tuple[str, int], tuple[str, int]]:
    """(file, offset in it) of every executable mapping that is watched -> (its rights, checksum)."""
    found: dict[tuple[str, int], tuple[str, int]] = {}
    total = 0
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or "x" not in parts[1] or not _WATCHED.search(parts[5]):
            continue
        begin, end = (int(x, 16) for x in parts[0].split("-"))
        total += end - begin
        if "r" not in parts[1] or total > _MOST_BYTES:
            continue
        code = (ctypes.c_char * (end - begin)).from_address(begin)
        found[parts[5].strip(), int(parts[2], 16)] = (parts[1], zlib.crc32(memoryview(code)))
    return found
