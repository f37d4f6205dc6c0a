"""Confine a process that runs untrusted code, and report in words which limits hold.

The jail closes once CUDA, torch and the baselines have started, because CUDA cannot start inside it everywhere. Nothing
of a candidate is loaded before. First comes :meth:`Jail.files`: landlock holds for this thread and its later threads,
not for CUDA's own. Then comes :meth:`Jail.calls`: seccomp holds for all threads. Each part is used if the system has
it; :func:`report` says which ones it has.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import pwd
import resource
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from outblas_lab.jail import landlock, seccomp
from outblas_lab.jail.system_calls import CHECKED_RELEASE

#: Environment that a worker keeps; everything else, keys and tokens among it, is taken away.
KEPT_ENVIRONMENT = (
    "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "NVIDIA_VISIBLE_DEVICES", "OUTBLAS_CACHE_DIR", "CUTLASS_DIR",
)  # fmt: skip
_SYSTEM = (
    "/usr", "/bin", "/lib", "/lib64", "/opt", "/sys", "/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime",
    "/etc/nvidia", "/etc/alternatives", "/proc/self", "/proc/driver", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat",
    "/proc/modules", "/proc/devices", "/proc/filesystems", "/proc/sys", "/proc/version", "/dev/urandom", "/dev/random",
)  # fmt: skip
#: The parts of an installation of Python or CUDA that programs need.
_INSTALLED = ("bin", "include", "lib", "lib64", "libexec", "nvvm", "targets", "pyvenv.cfg")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
#: The packages of this project, imported or not.
_OWN = ("outblas", "outblas_lab")
#: Packages that load parts of themselves late, and may be installed from a checkout.
_PACKAGES = ("torch", "numpy", "triton")
#: Timers and waiting signals of the user's, at most, for a worker to make more.
_TIMERS = 4096
_DEVICES = ("/dev/nvidia*", "/dev/nvidia-caps", "/dev/null", "/dev/zero")


class ConfinementLine(NamedTuple):
    """A line of a report on the jail.

    Attributes:
        on: True if it holds here.
        words: its effect if it holds, else the effect of its absence.
    """

    part: str
    on: bool
    words: str


@dataclass
class Jail:
    """The limits that a process puts on itself, by :meth:`environment`, :meth:`files`, :meth:`calls` in this order.

    The constructor limits nothing. No call can be undone, and it is no context manager.
    Example: ``Jail("/tmp/cell", cpu_seconds=60)``.

    Attributes:
        folder: its own folder, the only writable one.
        readable: readable paths beside the system's and Python's.
        cpu_seconds: seconds of processor time.
        file_bytes: largest file, in bytes.
        threads: processes and threads of the user; does not bind root.
        memory_bytes: address space in bytes; None: unlimited, as CUDA needs.
    """

    folder: str
    readable: tuple[str, ...] = ()
    cpu_seconds: int = 3600
    file_bytes: int = 1 << 30
    threads: int = 8192
    memory_bytes: int | None = None
    _kept: int = -1

    def environment(self) -> None:
        """Remove every environment variable that is not in :data:`KEPT_ENVIRONMENT`, from what /proc shows, too.

        ``HOME`` and ``TMPDIR`` become the jail's folder, and ``CUDA_CACHE_DISABLE`` becomes 1.
        """
        scrub_environment()
        os.environ.update({"HOME": self.folder, "TMPDIR": self.folder, "CUDA_CACHE_DISABLE": "1"})

    def files(self) -> None:
        """Let this thread, and what it starts, open only the jail's paths; drop root's privileges; set the limits.

        Without landlock, files stay open to it.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limits = [
            (resource.RLIMIT_CPU, self.cpu_seconds),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NPROC, self.threads),
            (resource.RLIMIT_SIGPENDING, _TIMERS),  # one worker could take those of all the user's processes
        ]
        if self.memory_bytes is not None:
            limits.append((resource.RLIMIT_AS, self.memory_bytes))
        for kind, value in limits:
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        # A rule holds for the folder that was opened: this one must not be made anew.
        self._kept = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC) if os.path.isdir("/proc/self") else -1
        landlock.restrict(readable_roots(self.readable), (self.folder,), devices())
        _drop_capabilities()

    def calls(self) -> None:
        """Refuse, in all threads, sockets, new programs and processes, access to other processes, and the like.

        Without seccomp it changes nothing.
        """
        seccomp.restrict()


def scrub_environment() -> None:
    """Remove every environment variable that is not in :data:`KEPT_ENVIRONMENT`, from what /proc shows, too.

    A second call changes nothing.
    """
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    os.environ.clear()
    _wipe_environment()
    os.environ.update(kept)


def report() -> list[ConfinementLine]:
    """Return the parts that a jail will have on this machine, and the dangers that none covers. Nothing is confined.

    The result is a list of 13 lines, in the order of :func:`lines`. The first has the part ``"files"``.
    """
    return lines(landlock.abi() > 0, seccomp.available(), landlock.abi())


def lines(files: bool, calls: bool, version: int) -> list[ConfinementLine]:
    """Return the report for a system with given limits: a list of 13 lines.

    Their parts are ``files``, ``signals and abstract sockets``, ``calls``, ``environment``, ``limits``,
    ``descriptors``, ``answers``, ``older threads``, ``names``, ``address space``, ``GPU memory``, ``the judge`` and
    ``side channels``. From ``older threads`` on, ``on`` is False always. ``signals and abstract sockets`` needs
    ``version`` 6.
    """
    return [
        ConfinementLine(
            "files",
            files,
            f"landlock ABI {version}: reads the system, Python and CUDA; writes only its own folder"
            if files
            else "no landlock: a worker reads and writes everything that its user can; run it in a container",
        ),
        ConfinementLine(
            "signals and abstract sockets",
            files and version >= 6,
            "none to other processes" if files and version >= 6 else "needs landlock ABI 6",
        ),
        ConfinementLine(
            "calls",
            calls,
            "seccomp: no new socket, program, process, trace, mount or signal; no limits of other processes; no file "
            f"modes, owners or attributes; no system calls newer than Linux {CHECKED_RELEASE}"
            if calls
            else "no seccomp: sockets, programs and processes are not blocked; run it in a container",
        ),
        ConfinementLine("environment", True, "scrubbed before CUDA starts: no keys, no tokens"),
        ConfinementLine(
            "limits", True, "CPU time, file size, threads (not for root), no core dumps; memory and folder watched"
        ),
        ConfinementLine("descriptors", True, "a worker inherits only its pipe to the driver"),
        ConfinementLine("answers", True, "reach the driver as JSON, never as pickles"),
        ConfinementLine(
            "older threads", False, "CUDA's threads can open the user's files: host code could run code in one"
        ),
        ConfinementLine("names", False, "file names, sizes, times and owners are visible (stat)"),
        ConfinementLine("address space", False, "not limited: CUDA maps all of the GPU's memory"),
        ConfinementLine("GPU memory", False, "only the driver separates it from other processes"),
        ConfinementLine(
            "the judge", False, "host code shares the process that proves and times it: it could forge an answer"
        ),
        ConfinementLine("side channels", False, "timing, caches, power: not covered"),
    ]


def readable_roots(more: tuple[str, ...] = ()) -> list[str]:
    """Return a list of the paths that a worker may read, such as ``["/usr", "/bin", ...]``.

    These are the system's and the interpreter's libraries, each ``site-packages`` and ``dist-packages`` on the module
    path, and the packages outblas, torch, numpy and triton. Then come the toolkits of ``CUDA_HOME`` and ``CUDA_PATH``,
    the kernels of ``OUTBLAS_CACHE_DIR``, and ``more``. No other folder of the module path is among them: it may be the
    working directory or a project. The root, a home, and a folder that holds one are left out. The paths need not
    exist.
    """
    installed = {os.path.realpath(path) for path in sys.path if os.path.basename(path) in _PACKAGE_FOLDERS}
    installed |= {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.realpath(sys.executable)}
    others = (path for name in _PACKAGES for path in getattr(sys.modules.get(name), "__path__", ()))
    own = (path for name in _OWN if (spec := find_spec(name)) for path in spec.submodule_search_locations or ())
    packages = {os.path.realpath(path) for path in (*own, *others)}
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    prefixes |= {path for name in ("CUDA_HOME", "CUDA_PATH") if (path := os.environ.get(name)) and _is_cuda(path)}
    whole = _whole()
    parts = {
        part for prefix in prefixes if os.path.realpath(prefix) not in whole for part in installation_parts(prefix)
    }
    cache = os.environ.get("OUTBLAS_CACHE_DIR")
    kernels = [os.path.join(cache, "cubin")] if cache else []
    found = [*_SYSTEM, *sorted(installed | packages | parts), *kernels, *more]
    return [path for path in found if os.path.realpath(path) not in whole]


def installation_parts(prefix: str | os.PathLike[str]) -> list[str]:
    """Return a list of the paths of an installation of Python or CUDA that programs need.

    What else lies in its folder may be a user's. The paths need not exist. Example: ``installation_parts("/x")`` begins
    with ``/x/bin`` and ``/x/include``.
    """
    return [*(os.path.join(prefix, name) for name in _INSTALLED), *glob.glob(os.path.join(prefix, "*-linux-gnu"))]


def _is_cuda(path: str) -> bool:
    """Return True if a folder is a CUDA toolkit."""
    return any(os.path.isfile(os.path.join(path, *part)) for part in (("include", "cuda.h"), ("bin", "nvcc")))


def _whole() -> list[str]:
    """The folders that are never readable as a whole: the root, the homes, and those that hold one."""
    # HOME may be the worker's own folder by now. A rule holds for what a link leads to, and for all beneath.
    whole = [os.path.realpath(home) for home in ("/", os.path.expanduser("~"), _home())]
    above = {str(folder) for home in whole for folder in Path(home).parents[:-1]}  # the last one is the root
    return [*whole, *above.difference(map(os.path.realpath, _SYSTEM))]


def _home() -> str:
    """The user's home by the system's records; ``/`` where they do not know the user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def devices() -> list[str]:
    """Return a list of the paths of the device files of CUDA that exist on this machine."""
    return [path for pattern in _DEVICES for path in glob.glob(pattern)]


def _wipe_environment() -> None:
    """Overwrite the strings that the process was started with, which stay readable in /proc/self/environ."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.clearenv()
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        begin, end = int(fields[47]), int(fields[48])  # env_start, env_end: proc(5), fields 50 and 51
    except (OSError, IndexError, ValueError):
        return
    if 0 < begin < end:
        ctypes.memset(begin, 0, end - begin)


def _drop_capabilities() -> bool:
    """Root without its privileges; of this thread and those that it starts."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    header = Header(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    return hasattr(libc, "capset") and libc.capset(ctypes.byref(header), ctypes.byref(data)) == 0
