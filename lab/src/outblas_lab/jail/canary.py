"""A canary: a worker in the real jail that attacks what was made for it, and which attacks the jail held.

It is started, shut in and heard as workers of free kernels are, but needs no GPU. Its victims are files in a temporary
folder, and the process that started it, which is asked for nothing that would change it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outblas.workers.sandbox import Emit, Sandbox, WorkerLoss
from outblas_lab.jail.confinement import Jail
from outblas_lab.jail.scratch_folder import scratch_folder
from outblas_lab.jail.system_calls import REFUSED

#: Seconds for one attack, and for the worker to start.
_STEP_S, _START_S = 5.0, 20.0
#: What makes the worker's handler.
FACTORY = f"{__name__}:make_canary"
_HELD = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_WORDS = 120
#: FS_IOC_SETFLAGS; the column of this machine in outblas_lab.jail.system_calls.
_SET_FLAGS = 0x40086602
_COLUMN = 1 if os.uname().machine == "aarch64" else 0


class AttackOutcome(NamedTuple):
    """The result of one attack.

    Attributes:
        held: True if it was blocked; False if it got through; None if it could not be tried here.
        words: the system's error message if it was blocked; "" if it got through.
    """

    attack: str
    held: bool | None
    words: str


def run_canary() -> list[AttackOutcome]:
    """Let a jailed worker try each attack of :data:`ATTACKS`. No GPU is needed.

    Returns:
        A list of one :class:`AttackOutcome` for each attack, in the order of :data:`ATTACKS`. The first is of ``"read a
        file"``. If an attack cost the worker, its ``held`` is None. An attack that got through raises no error.

    Raises:
        DeviceError: the worker cannot start.
    """
    with scratch_folder("outblas-canary-") as base:
        cell, victim = Path(base, "cell"), Path(base, "outside", "file")
        for folder in (cell, victim.parent):
            folder.mkdir()
        victim.write_text("outside")
        found = dict[int, AttackOutcome]()
        with Sandbox(FACTORY, (str(cell), str(victim)), _STEP_S, _START_S, codec=__name__) as box:
            for index, told in box.run(list(ATTACKS)):
                held, words = (None, told.detail) if isinstance(told, WorkerLoss) else told
                found[index] = AttackOutcome(list(ATTACKS)[index], held, words)
        return [found[index] for index in sorted(found)]


def make_canary(folder: str, victim: str) -> Callable[[list[tuple[int, str]], Emit], None]:
    """Put this process into a jail like that of free kernels and return the handler of a canary's worker.

    The handler is that of :func:`attack_handler`. The jail stays for good.
    """
    jail = Jail(folder)
    jail.environment()
    jail.files()
    jail.calls()
    return attack_handler(folder, victim)


def attack_handler(folder: str, victim: str) -> Callable[[list[tuple[int, str]], Emit], None]:
    """Return a function that tries attacks in this process, jailed or not.

    Returns:
        A function of (items, emit) that returns None. An item is (index, name of an attack), such as ``(0, "read a
        file")``. For each item it calls ``emit.begin(index)``, then ``emit.done(index, (held, words))``. ``held`` is
        True if the system refused, False if the attack got through, None if it failed for another reason.
    """

    def handler(items: list[tuple[int, str]], emit: Emit) -> None:
        for index, name in items:
            emit.begin(index)
            emit.done(index, _tried(name, folder, victim))

    return handler


def _tried(name: str, folder: str, victim: str) -> tuple[bool | None, str]:
    """Try an attack; return (held, the system's message). ``held`` is None if it failed for another reason."""
    try:
        ATTACKS[name](folder, victim)
    except OSError as error:
        return (True if error.errno in _HELD else None), str(error.strerror)[:_WORDS]
    return False, ""


def encode(value: tuple[bool | None, str]) -> list[object]:
    """Return a canary's answer (held, words) as a JSON list of two values."""
    return list(value)


def decode(data: object) -> tuple[bool | None, str]:
    """Return the pair (held, words) of a list of :func:`encode`; the words are cut to 120 characters.

    Raises:
        ValueError: the data are no such list.
    """
    if isinstance(data, list) and len(data) == 2 and data[0] in (True, False, None) and isinstance(data[1], str):
        return data[0], data[1][:_WORDS]
    raise ValueError("it is not a canary's answer")


def system_call(number: int, *arguments: object) -> int:
    """Make a Linux system call by its number and return its result, an integer of 0 or more.

    Args:
        arguments: integers, bytes or ctypes objects.

    Raises:
        OSError: the call fails. ``errno`` says why: ENOSYS for an unknown number.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _sends(folder: str, victim: str) -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        end.close()


def _attributes(folder: str, victim: str) -> None:
    """By the call of Linux 6.13, which an older kernel does not have."""

    class Value(ctypes.Structure):
        _fields_ = [("value", ctypes.c_uint64), ("size", ctypes.c_uint32), ("flags", ctypes.c_uint32)]

    text = ctypes.create_string_buffer(b"x", 1)
    value = Value(ctypes.addressof(text), 1, 0)
    number, path = REFUSED["setxattrat"][_COLUMN], os.fsencode(victim)
    assert number is not None
    size = ctypes.c_size_t(ctypes.sizeof(value))
    system_call(number, ctypes.c_int(-100), path, 0, b"user.outblas", ctypes.byref(value), size)


def _flags(folder: str, victim: str) -> None:
    """Of a file of its own, which is open; the request does not depend on whose it is."""
    with Path(folder, "own").open("wb") as file:
        fcntl.ioctl(file, _SET_FLAGS, struct.pack("l", 0))


def _inherits(folder: str, victim: str) -> None:
    """Pipes to other processes: its own connection is a socket."""
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                return
    raise OSError(errno.EPERM, "no pipe is open")


#: Attack -> function of the worker's folder and a file outside; it raises if the jail refuses.
ATTACKS: dict[str, Callable[[str, str], object]] = {
    "read a file": lambda folder, victim: Path(victim).read_text(),
    "write a file": lambda folder, victim: Path(victim).with_name("new").write_text("x"),
    "open a socket": lambda folder, victim: socket.socket(socket.AF_UNIX).close(),
    "send a datagram": _sends,
    "start a program": lambda folder, victim: os.waitpid(
        os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], {}), 0
    ),
    "signal the parent": lambda folder, victim: os.kill(os.getppid(), 0),
    "see the parent's limits": lambda folder, victim: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
    "change a file's attributes": _attributes,
    "change a file's flags": _flags,
    "watch a folder": lambda folder, victim: os.close(system_call(REFUSED["inotify_init1"][_COLUMN] or 0, 0)),
    "use an inherited pipe": _inherits,
}
