"""A worker in the real jail that tries the attacks it receives, and answers ``done`` or the name of the error.

Its victims belong to the test: a file outside, open for reading since before the jail closed; a process; a socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import multiprocessing
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time
from multiprocessing import resource_tracker

from outblas_lab.jail import system_calls
from outblas_lab.jail.canary import system_call
from outblas_lab.jail.confinement import Jail

COLUMN = 1 if os.uname().machine == "aarch64" else 0
CALLS = {**system_calls.REFUSED, **system_calls.BY_ARGUMENT, **system_calls.HARMLESS}
AT_FDCWD = -100


def call(name, *arguments):
    number = CALLS[name][COLUMN]
    return system_call(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))


def descriptors():
    """The kinds of things that are open, but for the standard ones."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself, closed by now
            if int(name) > 2:
                yield os.readlink(f"/proc/self/fd/{name}").partition(":")[0]


class Attacker:
    """Each method whose name begins with ``try_`` is one attempt."""

    def __init__(self, folder, victim, pid, address):
        self.folder, self.victim, self.pid, self.address = folder, os.fsencode(victim), pid, address
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        self.core = hard
        self.kept = set(descriptors())
        self.open = os.open(victim, os.O_RDONLY)
        self.jail = Jail(folder, cpu_seconds=60)
        self.jail.environment()
        self.jail.files()
        self.jail.calls()

    # Finding 1: others' limits, places and signals.
    def try_limits_of_others(self):
        resource.prlimit(self.pid, resource.RLIMIT_CPU, (0, 0))

    def try_see_limits_of_others(self):
        resource.prlimit(self.pid, resource.RLIMIT_CPU)

    def try_own_new_limits(self):
        call("prlimit64", 0, resource.RLIMIT_NOFILE, struct.pack("QQ", 64, 64), 0)

    def try_own_new_limits_by_setrlimit(self):
        call("setrlimit", resource.RLIMIT_NOFILE, struct.pack("QQ", 64, 64))

    def try_affinity_of_others(self):
        os.sched_setaffinity(self.pid, {0})

    def try_schedule_of_others(self):
        os.sched_setparam(self.pid, os.sched_param(0))

    def try_priority_of_others(self):
        os.setpriority(os.PRIO_PROCESS, self.pid, 1)

    def try_owner_of_a_signal(self):
        fcntl.fcntl(self.open, fcntl.F_SETOWN, self.pid)

    def try_signal_of_a_file(self):
        fcntl.fcntl(self.open, fcntl.F_SETSIG, signal.SIGKILL)

    def try_leave_the_group(self):
        os.setsid()

    def try_other_user(self):
        os.setuid(os.getuid())

    # Finding 2: modes by calls that came later.
    def try_new_attributes(self):
        text = ctypes.create_string_buffer(b"x", 1)
        value = struct.pack("QII", ctypes.addressof(text), 1, 0)
        call("setxattrat", AT_FDCWD, self.victim, 0, b"user.outblas", value, 16)

    def try_fewer_attributes(self):
        call("removexattrat", AT_FDCWD, self.victim, 0, b"user.outblas")

    def try_attributes_of_a_file(self):
        call("file_setattr", AT_FDCWD, self.victim, bytes(24), 24, 0)

    def try_read_attributes(self):
        os.listxattr(self.victim)

    def try_cut_a_file(self):
        call("truncate", self.victim, 0)

    # Finding 9: requests, watches, semaphores.
    def try_flags(self):
        fcntl.ioctl(self.open, 0x40086602, struct.pack("l", 0x40))

    def try_flags_of_32_bits(self):
        fcntl.ioctl(self.open, 0x40046602, struct.pack("l", 0x40))

    def try_flags_with_a_long_request(self):
        call("ioctl", self.open, 0x7F_4008_6602, struct.pack("l", 0x40))

    def try_project(self):
        fcntl.ioctl(self.open, 0x401C5820, bytes(28))

    def try_type_into_the_terminal(self):
        fcntl.ioctl(self.open, termios.TIOCSTI, b"x")

    def try_watch(self):
        call("inotify_init1", 0)

    def try_watch_with_an_old_watcher(self):
        call("inotify_add_watch", self.open, self.victim, 1)

    def try_notify(self):
        fcntl.fcntl(self.open, fcntl.F_NOTIFY, fcntl.DN_ACCESS)

    def try_semaphores(self):
        call("semtimedop", -1, bytes(6), 1, 0)

    def try_take_the_machines_requests(self):
        call("io_setup", 1, bytes(8))

    def try_datagram(self):
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with near, far:
            near.sendto(b"out", self.address)

    # Finding 8: its arguments and environment.
    def try_descriptors(self):
        """Return the kinds of targets of its descriptors."""
        return " ".join(sorted(self.kept - {os.devnull}))

    def try_tracker(self):
        """Multiprocessing finds its tracker, and starts none."""
        resource_tracker.ensure_running()
        resource_tracker.register("/outblas-none", "semaphore")
        resource_tracker.unregister("/outblas-none", "semaphore")
        return "none" if resource_tracker._resource_tracker._pid is None else "one"

    def try_core(self):
        return f"{self.core != 0} {resource.getrlimit(resource.RLIMIT_CORE)}"

    # What a worker needs.
    def try_what_is_needed(self):
        """The first thing that is refused, or ``done``."""
        for name in dir(self):
            if name.startswith("need_"):
                try:
                    getattr(self, name)()
                except OSError as error:
                    return f"{name}: {error}"
        return "done"

    def need_memory(self):
        with mmap.mmap(-1, 1 << 16) as memory:
            memory.madvise(mmap.MADV_DONTNEED)
        call("membarrier", 0, 0, 0)

    def need_threads(self):
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        thread.join()
        ctypes.CDLL(None).prctl(15, b"name", 0, 0, 0)

    def need_places(self):
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        os.sched_setaffinity(os.getpid(), os.sched_getaffinity(os.getpid()))

    def need_limits(self):
        for kind in (resource.RLIMIT_STACK, resource.RLIMIT_NOFILE):
            assert resource.getrlimit(kind) == resource.prlimit(0, kind) == resource.prlimit(os.getpid(), kind)

    def need_descriptors(self):
        with tempfile.TemporaryFile() as file:
            assert not os.isatty(file.fileno())
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_NONBLOCK)
            os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(os.memfd_create("x"))
        for pipe in multiprocessing.Pipe():
            pipe.close()
        with select.epoll() as waiting:
            waiting.poll(0)
        os.close(call("eventfd2", 0, 0))
        os.close(call("timerfd_create", time.CLOCK_MONOTONIC, 0))

    def need_devices(self):
        """Requests as CUDA's (type F, and plain numbers) reach the device, which does not know them here."""
        with open(os.devnull, "rb") as device:
            for request in (0xC020462A, 0x30000001, 0x25):
                try:
                    fcntl.ioctl(device, request, bytes(64))
                except OSError as error:
                    if error.errno == errno.EPERM:
                        raise

    def need_numbers(self):
        import numpy

        assert float((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()) == 64**3
        os.urandom(8)


def attacker(folder, victim, pid, address):
    """The handler: an attempt's name is answered by what it returns, ``done`` or an error's name."""
    attacks = Attacker(folder, victim, pid, address)

    def handler(items, emit):
        for index, name in items:
            emit.begin(index)
            if name == "live on":
                os.closerange(3, 256)
                time.sleep(20)
                sys.exit(3)
            try:
                emit.done(index, getattr(attacks, name)() or "done")
            except OSError as error:
                emit.done(index, errno.errorcode.get(error.errno, str(error)))

    return handler


def open_canary(folder, victim):
    """The canary's worker without a jail."""
    from outblas_lab.jail.canary import attack_handler

    return attack_handler(folder, victim)


def encode(value):
    return value


def decode(data):
    return str(data)
