"""A compiler's process: few files, bounded time and memory, no secrets in its environment.

The parent gives one job as JSON on standard input and reads what the job leaves in a folder of its own. A job is a
program to become (nvcc), or a source for NVRTC, which is a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outblas.core.errors import CompileError
from outblas_lab.jail.confinement import KEPT_ENVIRONMENT

_BOOT = "import sys; sys.path[:0] = {paths!r}; from {module} import main; main()"
#: What a compiler may say at most, bytes kept.
LOG_BYTES = 256 * 1024
_FILE_BYTES = 1 << 30
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class CompileLimits:
    """Limits of one compilation. A compiler that passes one is killed, and the kernel has status COMPILE_ERROR.

    Attributes:
        seconds: limit of elapsed time, and of processor time.
        memory_bytes: limit of address space.
    """

    seconds: float
    memory_bytes: int


def run_confined(
    job: Mapping[str, Any], folder: Path, readable: Sequence[str], limits: CompileLimits
) -> tuple[int, str]:
    r"""Run a compiler in a confined process of its own and wait for it.

    Example: the job ``{"program": ["/bin/echo", "hi"]}`` returns ``(0, "hi\n")``. An exit code other than 0 raises no
    error.

    Args:
        job: ``{"program": [...]}`` or ``{"nvrtc": {...}}`` (see :func:`main`). A program is named by its whole path.
        folder: the process's own folder, where it leaves its results. It must exist. The output is kept there in the
            file ``said``.

    Returns:
        (exit code, output as text, at most 256 KiB). The output is that of both standard streams.

    Raises:
        CompileError: it takes longer than allowed; ``log`` has the output so far.
    """
    spec = {"folder": str(folder), "readable": list(readable), "memory": limits.memory_bytes, **job}
    spec["parent"] = os.getpid()
    spec["cpu"] = int(4 * limits.seconds) + 1
    environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder)}
    boot = _BOOT.format(module=__name__, paths=[os.path.abspath(path) for path in sys.path if path])
    said = folder / "said"
    with said.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", boot], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            child.communicate(json.dumps(spec).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"the compiler ran longer than {limits.seconds:g} s", "a source that compiles in time",
                "simplify the source", _read(said),
            ) from None  # fmt: skip
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return child.returncode, _read(said)


def main() -> None:
    """Run in the child process: read the job from standard input, confine the process, then compile.

    The job ``nvrtc`` holds ``text, entry, headers, options, acc, arch, key`` and leaves the file ``cubin``, or
    ``error``; ``program`` is an argument vector. If the parent is killed, this process ends with all that it started.
    """
    from outblas_lab.jail.confinement import Jail

    spec = json.loads(sys.stdin.buffer.read())
    jail = Jail(spec["folder"], tuple(spec["readable"]), spec["cpu"], _FILE_BYTES, 4096, spec["memory"])
    jail.files()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    _end_with(spec["parent"], signal.SIGTERM if "program" in spec else signal.SIGKILL)
    if "program" in spec:
        _become(subprocess.run(spec["program"], check=False).returncode)
    jail.calls()
    _nvrtc(spec["nvrtc"], Path(spec["folder"]))


def _end_with(parent: int, sent: signal.Signals) -> None:
    """Kill this process and its group as soon as the parent is gone. Nobody else would count their seconds.

    Args:
        sent: signal that the system sends then. SIGTERM ends the group, but waits for a library's call.
    """

    def end(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PARENT_DEATH_SIGNAL, int(sent), 0, 0, 0)
    if os.getppid() != parent:  # it went before
        end()


def _become(code: int) -> NoReturn:
    """End as a program has ended, by its exit code or its signal."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _nvrtc(job: dict[str, Any], folder: Path) -> None:
    from outblas.core.errors import OutblasError
    from outblas.kernels.source import Source
    from outblas.runtime.cubin import encode
    from outblas.runtime.nvrtc import compile_foreign

    headers = tuple((name, text) for name, text in job["headers"])
    source = Source(job["text"], job["entry"], headers, tuple(job["options"]), job["acc"], "free")
    try:
        cubin = compile_foreign(source, job["arch"])
    except OutblasError as error:
        error_json = {"kind": type(error).__name__, "parts": [error.wrong, error.expected, error.do]}
        error_json["log"] = getattr(error, "log", "")
        (folder / "error").write_text(json.dumps(error_json))
        return
    (folder / "cubin").write_bytes(encode(cubin, job["key"]))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode(errors="replace")


def memory_limit(nbytes: int) -> int:
    """Return ``nbytes``, or the hard limit of this process's address space if that is smaller."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    return nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
