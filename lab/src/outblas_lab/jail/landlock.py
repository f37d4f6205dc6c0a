"""Linux' landlock by its system calls: from here on this thread, and what it starts, opens only what is named.

Source: https://docs.kernel.org/userspace-api/landlock.html. Needs no library and no privilege, works for root too.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
#: Rights up to the ABI that brought them: files (1), renames across folders (2), truncation (3), device ioctls (5).
_FIRST = (1 << 13) - 1
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_TCP = (1 << 0) | (1 << 1)  # bind, connect (ABI 4)
_SCOPES = (1 << 0) | (1 << 1)  # abstract sockets and signals of others (ABI 6)
_NO_NEW_PRIVS = 38


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def abi() -> int:
    """Return the kernel's version of landlock, 1 or more; 0 if it has none, or it is switched off."""
    if not hasattr(os, "O_PATH"):
        return 0
    found = _libc().syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(0, int(found))


def restrict(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str] = ()) -> int:
    """Let this thread, and what it starts, open only these paths and what lies beneath them, for good.

    Paths that do not exist are ignored. A second call restricts further. Example: ``restrict(["/usr"], ["/tmp/cell"])``
    returns ``7`` on a new Linux.

    Args:
        readable: paths to read and execute.
        writable: paths to read, write, create and remove.
        devices: paths to read, write and control by ioctl.

    Returns:
        The ABI that is enforced. 0: the kernel has no landlock, and nothing was changed.

    Raises:
        OSError: the kernel knows landlock and refuses.
    """
    version = abi()
    if not version:
        return 0
    fs = _FIRST | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    fs |= _IOCTL if version >= 5 else 0
    attributes = _Ruleset(fs, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _checked("landlock_create_ruleset", _CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for paths, access in (
            (readable, _EXECUTE | _READ | _READ_DIR),
            (writable, fs & ~_IOCTL),
            (devices, (_READ | _WRITE | _READ_DIR | _IOCTL) & fs),
        ):
            for path in paths:
                _allow(rules, path, access & fs)
        _libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        _checked("landlock_restrict_self", _RESTRICT, rules, 0)
    finally:
        os.close(rules)
    return version


def _allow(rules: int, path: str, access: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            access &= _ON_FILES
        rule = _Beneath(access, handle)
        _checked(f"landlock_add_rule({path})", _ADD, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(handle)


def _checked(what: str, *arguments: object) -> int:
    found = int(_libc().syscall(*arguments))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
