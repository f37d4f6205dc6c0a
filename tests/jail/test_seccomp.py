"""The filter's program for each machine, run by an interpreter: what every system call gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outblas_lab.jail import seccomp
from outblas_lab.jail.system_calls import BY_ARGUMENT, HARMLESS, HIGHEST, REFUSED
from support.jail_inside import bpf

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50001, 0x50026
PID, OTHER = 1234, 4321
#: Machine -> audit architecture, column of the tables.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
CALLS = {**REFUSED, **BY_ARGUMENT, **HARMLESS}
#: Names of numbers that no kernel of today answers.
GONE = {
    "uselib", "_sysctl", "create_module", "get_kernel_syms", "query_module", "nfsservctl", "getpmsg", "putpmsg",
    "afs_syscall", "tuxcall", "security", "set_thread_area", "get_thread_area", "lookup_dcookie",
    "epoll_ctl_old", "epoll_wait_old", "vserver",
}  # fmt: skip
HEADERS = {
    "x86_64": [*Path("/usr/include").glob("x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    "aarch64": [Path("/usr/include/asm-generic/unistd.h")],
}


def answer(machine, call, *arguments):
    audit, column = MACHINES[machine]
    number = call if isinstance(call, int) else CALLS[call][column]
    return bpf.run(seccomp.program(machine, PID), audit, number, arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_gets_what_its_table_says(machine):
    audit, column = MACHINES[machine]
    code = seccomp.program(machine, PID)
    wanted = {numbers[column]: EPERM for numbers in REFUSED.values()}
    wanted |= {numbers[column]: ALLOW for numbers in HARMLESS.values()}
    ruled = {numbers[column] for numbers in BY_ARGUMENT.values()}
    for call in (*range(HIGHEST + 80), 1 << 30, (1 << 30) + 41, (1 << 31) + 1, (1 << 32) - 1):
        if call not in ruled:
            assert bpf.run(code, audit, call) == wanted.get(call, ENOSYS), call


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_are_refused(machine):
    code = seccomp.program(machine, PID)
    assert bpf.run(code, 0x40000003, CALLS["read"][MACHINES[machine][1]]) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_a_number_stands_once(machine):
    numbers = [each[MACHINES[machine][1]] for table in (REFUSED, BY_ARGUMENT, HARMLESS) for each in table.values()]
    numbers = [each for each in numbers if each is not None]
    assert len(numbers) == len(set(numbers)) and max(numbers) == HIGHEST
    assert len(CALLS) == len(REFUSED) + len(BY_ARGUMENT) + len(HARMLESS)


def test_newer_calls_have_one_number_everywhere():
    assert all(x86 in (arm, None) for x86, arm in CALLS.values() if arm is not None and arm >= 424)
    assert all(arm in (x86, None) for x86, arm in CALLS.values() if x86 is not None and x86 >= 424)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_tables_have_all_that_the_systems_headers_have(machine):
    header = next((path for path in HEADERS[machine] if path.is_file()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    named = {
        name: int(number)
        for name, number in re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)
    }
    spelled = {"fstatat": "newfstatat"}  # by asm-generic's own name
    for name in GONE | {"arch_specific_syscall", "syscalls", "sync_file_range2"}:
        named.pop(name, None)
    column = MACHINES[machine][1]
    known = {name: numbers[column] for name, numbers in CALLS.items()}
    compared = {spelled.get(name, name): number for name, number in named.items() if number <= HIGHEST}
    if machine == "aarch64":  # numbers from 403 to 423 are for machines of 32 bits
        compared = {name: number for name, number in compared.items() if not 403 <= number <= 423}
    assert len(compared) > 290
    assert {name: known.get(name) for name in compared} == compared


SETTER = 0x7FFF00000000  # an address
UNIX, INET, STREAM, DATAGRAM, SEQPACKET, CLOSE_ON_EXEC = 1, 2, 1, 2, 5, 0o2000000
TERMINAL_WORDS = {"TCGETS": 0x5401, "FIONREAD": 0x541B, "FIOCLEX": 0x5451, "TCGETS2": 0x802C542A}
DEVICE_WORDS = {"NVIDIA": 0xC020462A, "UVM": 0x25, "UVM_INITIALIZE": 0x30000001}
RULES = [
    ("prlimit64", (0, 7, 0, SETTER), ALLOW),
    ("prlimit64", (PID, 7, 0, SETTER), ALLOW),
    ("prlimit64", (1 << 32, 7, 0, SETTER), ALLOW),  # the kernel reads the lower half alone: 0
    ("prlimit64", (OTHER, 7, 0, SETTER), EPERM),
    ("prlimit64", (OTHER, 7, SETTER, 0), EPERM),
    ("prlimit64", (0, 7, 4096, 0), EPERM),
    ("prlimit64", (0, 7, SETTER, 0), EPERM),
    ("prlimit64", (-1, 7, 0, 0), EPERM),
    *((call, (pid, 8, 4096), said) for call in ("sched_setaffinity", "migrate_pages", "move_pages")
      for pid, said in ((0, ALLOW), (PID, ALLOW), (OTHER, EPERM), (-1, EPERM))),
    ("tgkill", (PID, PID, 6), ALLOW),
    ("tgkill", (PID, PID, 9), EPERM),
    ("tgkill", (OTHER, OTHER, 6), EPERM),
    ("clone3", (4096, 88), ENOSYS),
    ("clone", (0x3D0F00,), ALLOW),  # a thread, by glibc
    ("clone", (0x1200011,), EPERM),  # fork, by glibc
    ("prctl", (15, 4096), ALLOW),
    *(("prctl", (option, 1), EPERM) for option in (4, 35, 62, 0x59616D61)),
    ("socketpair", (UNIX, STREAM | CLOSE_ON_EXEC, 0), ALLOW),
    ("socketpair", (UNIX, DATAGRAM | CLOSE_ON_EXEC, 0), EPERM),
    ("socketpair", (UNIX, SEQPACKET, 0), EPERM),
    ("socketpair", (INET, STREAM, 0), EPERM),
    *(("ioctl", (3, word), ALLOW) for word in (*TERMINAL_WORDS.values(), *DEVICE_WORDS.values())),
    *(("ioctl", (3, word), EPERM) for word in (
        0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x5412, 0x541C, 0x5452, 0x8901, 0x8902, 0x5000940E,
        (7 << 32) | 0x40086602, 0x5410, 0x40046685,
    )),
    *(("fcntl", (3, command), ALLOW) for command in (0, 1, 2, 3, 4, 6, 7, 1030, 1031, 1033)),
    *(("fcntl", (3, command), EPERM) for command in (8, 10, 15, 1024, 1026, 1040)),
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_some_calls_depend_on_their_arguments(machine):
    for call, arguments, said in RULES:
        assert answer(machine, call, *arguments) == said, (call, arguments)
    assert {call for call, _, _ in RULES} == set(BY_ARGUMENT)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_attacks_have_used_is_refused_by_name(machine):
    for call in (
        "setxattrat", "removexattrat", "file_setattr", "open_tree_attr", "inotify_init1", "inotify_add_watch",
        "fanotify_init", "semtimedop", "process_mrelease", "kcmp", "personality", "setresuid", "vhangup", "quotactl_fd",
        "memfd_secret", "setrlimit", "setpriority", "ioprio_set", "sched_setparam", "kill", "socket", "execve",
    ):  # fmt: skip
        assert answer(machine, call) == EPERM, call
    assert answer("x86_64", "modify_ldt") == EPERM and answer(machine, HIGHEST + 1) == ENOSYS
