"""A seccomp filter by hand: system calls that a worker needs no more are refused with EPERM, in all of its threads.

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html; numbers of calls from the kernel's unistd tables.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

_SET_FILTER, _TSYNC = 1, 1
_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06  # ld word, jeq, jset, ret
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

#: Machine -> (audit architecture, seccomp's own number, calls by name).
_X86: dict[str, int] = {
    "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288, "execve": 59, "execveat": 322,
    "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "ptrace": 101, "process_vm_readv": 310,
    "process_vm_writev": 311, "process_madvise": 440, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "mount": 165,
    "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "setns": 308, "unshare": 272, "bpf": 321,
    "perf_event_open": 298, "keyctl": 250, "add_key": 248, "request_key": 249, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167,
    "swapoff": 168, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "userfaultfd": 323,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "acct": 163, "quotactl": 179, "settimeofday": 164,
    "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "syslog": 103, "mknod": 133, "mknodat": 259, "chmod": 90, "fchmod": 91, "fchmodat": 268,
    "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "utimensat": 280, "utime": 132,
    "utimes": 235, "futimesat": 261, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241, "setpriority": 141,
    "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251, "prctl": 157,
}  # fmt: skip
_ARM: dict[str, int] = {
    "socket": 198, "connect": 203, "bind": 200, "listen": 201, "accept": 202, "accept4": 242, "execve": 221,
    "execveat": 281, "clone": 220, "clone3": 435, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
    "process_madvise": 440, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
    "rt_tgsigqueueinfo": 240, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "mount": 40,
    "umount2": 39, "pivot_root": 41, "chroot": 51, "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "mount_setattr": 442, "setns": 268, "unshare": 97, "bpf": 280,
    "perf_event_open": 241, "keyctl": 219, "add_key": 217, "request_key": 218, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224,
    "swapoff": 225, "sethostname": 161, "setdomainname": 162, "userfaultfd": 282, "open_by_handle_at": 265,
    "name_to_handle_at": 264, "acct": 89, "quotactl": 60, "settimeofday": 170, "clock_settime": 112,
    "clock_adjtime": 266, "adjtimex": 171, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "syslog": 116, "mknodat": 33, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54,
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
    "utimensat": 88, "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190, "semop": 193, "semctl": 191,
    "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180, "mq_unlink": 181, "setpriority": 140,
    "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30, "prctl": 167,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, 317, _X86), "aarch64": (0xC00000B7, 277, _ARM)}
#: Those with a rule of their own; all others of the tables are refused.
_RULED = ("clone", "clone3", "tgkill", "prctl")
_X32 = 0x40000000


def available() -> bool:
    """Whether the filter can be written for this machine and the kernel takes filters."""
    return platform.machine() in _MACHINES and os.path.exists("/proc/sys/kernel/seccomp")


def restrict() -> bool:
    """Put the filter on every thread of this process, for good; False: not available, and nothing was changed.

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
    """The filter as BPF instructions of 8 bytes, for one process of one kind of machine."""
    audit, _, calls = _MACHINES[machine]
    deny, unknown, allow = _return(_ERRNO | _EPERM), _return(_ERRNO | _ENOSYS), _return(_ALLOW)
    code = [_load(_ARCH), _jump(_JUMP_EQUAL, audit, 1, 0), deny, _load(_NUMBER)]
    if machine == "x86_64":  # the x32 calls have other numbers
        code += [_jump(_JUMP_ANY, _X32, 0, 1), deny]
    code += _if(calls["clone3"], [unknown])  # glibc then asks for clone, whose flags can be read
    code += _if(calls["clone"], [_load(_ARGUMENTS), _jump(_JUMP_ANY, _CLONE_THREAD, 1, 0), deny, allow])
    # A process may abort itself; a signal to another thread, or process, is nobody's business.
    code += _if(
        calls["tgkill"],
        [
            _load(_ARGUMENTS), _jump(_JUMP_EQUAL, pid, 0, 2),
            _load(_ARGUMENTS + 16), _jump(_JUMP_EQUAL, signal.SIGABRT, 1, 0),
            deny, allow,
        ],
    )  # fmt: skip
    # PR_SET_PTRACER, PR_SET_MM, PR_SET_DUMPABLE: only to undo what protects others.
    forbidden = (0x59616D61, 35, 4)
    code += _if(calls["prctl"], [_load(_ARGUMENTS), *(x for f in forbidden for x in (_jump(_JUMP_EQUAL, f, 0, 1), deny)), allow])  # fmt: skip # noqa: E501
    for name, call in calls.items():
        if name not in _RULED:
            code += [_jump(_JUMP_EQUAL, call, 0, 1), deny]
    return b"".join([*code, allow])


def _if(call: int, then: list[bytes]) -> list[bytes]:
    """``then``, which returns, where the number loaded is ``call``."""
    return [_jump(_JUMP_EQUAL, call, 0, len(then)), *then]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _jump(kind: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("<HBBI", kind, yes, no, value & 0xFFFFFFFF)


def _return(value: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, value)
