"""A seccomp filter by hand: of the system calls, those that a worker needs no more are refused in all of its threads.

:mod:`outblas_lab.jail.system_calls` says which are; here are the rules of those that depend on their arguments. A call
that is in none of its tables fails with ENOSYS, as on an older kernel, and C libraries then do without it.

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html; requests from the kernel's uapi headers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct

from outblas_lab.jail.system_calls import BY_ARGUMENT, HARMLESS, HIGHEST, REFUSED

_SET_FILTER, _TSYNC = 1, 1
_NO_NEW_PRIVS = 38
# ld word, jeq, jge, jset, and, ret
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_ANY, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

#: Machine -> audit architecture, seccomp's own number, column of the tables.
_MACHINES = {"x86_64": (0xC000003E, 317, 0), "aarch64": (0xC00000B7, 277, 1)}

_CLONE_THREAD = 0x10000
#: PR_SET_DUMPABLE, PR_SET_MM, PR_SET_PTRACER: they undo what protects others. PR_SCHED_CORE: slows others down.
_PRCTL_REFUSED = (4, 35, 0x59616D61, 62)
#: F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others. F_SETLEASE, F_NOTIFY, F_SETDELEG: watch or block other openers.
_FCNTL_REFUSED = (8, 10, 15, 1024, 1026, 1040)
#: Requests by their second byte: flags and attributes of files ("f", "v", "X", btrfs), owners of sockets' signals.
_IOCTL_REFUSED = (0x6600, 0x7600, 0x5800, 0x9400, 0x8900)
#: Of a terminal's ("T"), where TIOCSTI types into it: TCGETS, TIOCGPGRP, TIOCOUTQ, TIOCGWINSZ, FIONREAD, FIONBIO,
#: TIOCGSID, FIONCLEX, FIOCLEX, FIOQSIZE, TCGETS2. The rest is refused.
_TERMINAL = 0x5400
_TERMINAL_ALLOWED = (0x5401, 0x540F, 0x5411, 0x5413, 0x541B, 0x5421, 0x5429, 0x5450, 0x5451, 0x5460, 0x802C542A)


def available() -> bool:
    """Return True if the filter can be built for this machine and the kernel accepts filters."""
    return platform.machine() in _MACHINES and os.path.exists("/proc/sys/kernel/seccomp")


def restrict() -> bool:
    """Put the filter on every thread of this process, for good. A second call adds another filter.

    Returns:
        True; False if it is not available and nothing was changed.

    Raises:
        OSError: the kernel refuses it.
    """
    if not available():
        return False
    _, number, _ = _MACHINES[platform.machine()]
    code = program(platform.machine(), os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    given = Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(number, _SET_FILTER, _TSYNC, ctypes.byref(given)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
    return True


def program(machine: str, pid: int) -> bytes:
    """Return the filter as BPF code, 8 bytes an instruction. Nothing is installed.

    Args:
        machine: ``x86_64`` or ``aarch64``; another one raises KeyError.
        pid: process under the filter; calls that name another process are refused.
    """
    audit, _, column = _MACHINES[machine]
    code = [_step(_LOAD, _ARCH), _step(_JUMP_EQUAL, audit, 1, 0), _DENY, _step(_LOAD, _NUMBER)]
    for name, rule in _rules(pid).items():
        call = BY_ARGUMENT[name][column]
        if call is not None:
            code += [_step(_JUMP_EQUAL, call, 0, len(rule)), *rule]
    (_, lowest), *higher = _ranges(column)
    for start, answer in reversed(higher):
        code += [_step(_JUMP_FROM, start, 0, 1), answer]
    code.append(lowest)
    return b"".join(code)


def _ranges(column: int) -> list[tuple[int, bytes]]:
    """Return (first number, answer) of each run of system-call numbers with one answer, from 0 on.

    The last run is open.
    """
    answers = {numbers[column]: _DENY for numbers in REFUSED.values()}
    answers |= {numbers[column]: _PASS for numbers in HARMLESS.values()}
    ruled = {numbers[column] for numbers in BY_ARGUMENT.values()}
    found: list[tuple[int, bytes]] = []
    for call in range(HIGHEST + 2):
        answer = answers.get(call, _UNKNOWN)
        if call not in ruled and (not found or found[-1][1] != answer):
            found.append((call, answer))
    return found


def _rules(pid: int) -> dict[str, list[bytes]]:
    """Return the filter code for each call in BY_ARGUMENT; every path through it ends in an answer."""
    own = [_argument(0), *_unless((0, pid), _DENY)]
    return {
        "clone3": [_UNKNOWN],  # glibc then asks for clone, whose flags can be read
        "clone": [_argument(0), _step(_JUMP_ANY, _CLONE_THREAD, 1, 0), _DENY, _PASS],
        # A process may abort itself; a signal to another thread, or process, is nobody's business.
        "tgkill": [
            _argument(0), *_unless((pid,), _DENY), _argument(2), *_unless((signal.SIGABRT,), _DENY), _PASS,
        ],
        "prctl": [_argument(0), *_where(_PRCTL_REFUSED, _DENY), _PASS],
        # Limits may be read but not set: a thread that has kept root's privileges could undo the jail's limits.
        "prlimit64": [*own, _argument(2), *_unless((0,), _DENY), _argument(2, 1), *_unless((0,), _DENY), _PASS],
        "sched_setaffinity": [*own, _PASS],
        "migrate_pages": [*own, _PASS],
        "move_pages": [*own, _PASS],
        # A pair of datagram sockets can send to any address, without a connection.
        "socketpair": [
            _argument(0), *_unless((socket.AF_UNIX,), _DENY), _argument(1), _step(_AND, 0xF),
            *_unless((socket.SOCK_STREAM,), _DENY), _PASS,
        ],
        "ioctl": [
            _argument(1), _step(_AND, 0xFF00), *_where(_IOCTL_REFUSED, _DENY), *_unless((_TERMINAL,), _PASS),
            _argument(1), *_where(_TERMINAL_ALLOWED, _PASS), _DENY,
        ],
        "fcntl": [_argument(1), *_where(_FCNTL_REFUSED, _DENY), _PASS],
    }  # fmt: skip


def _where(values: tuple[int, ...], answer: bytes) -> list[bytes]:
    """``answer`` where what is loaded is one of these; else what follows."""
    return [step for value in values for step in (_step(_JUMP_EQUAL, value, 0, 1), answer)]


def _unless(values: tuple[int, ...], answer: bytes) -> list[bytes]:
    """``answer`` where what is loaded is none of these; else what follows."""
    return [*(_step(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)), answer]


def _argument(index: int, half: int = 0) -> bytes:
    """Load the lower half of an argument, or its upper one; both machines have the lower one first."""
    return _step(_LOAD, _ARGUMENTS + 8 * index + 4 * half)


def _step(kind: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return an instruction; ``yes`` and ``no`` say how many instructions a jump skips."""
    return struct.pack("<HBBI", kind, yes, no, value & 0xFFFFFFFF)


_DENY, _UNKNOWN, _PASS = (_step(_RETURN, answer) for answer in (_ERRNO | _EPERM, _ERRNO | _ENOSYS, _ALLOW))
