"""Build ``outblas.dispatch._native``, the fast paths of ``outblas.matmul`` and of torch's own products.

It uses the system's C and C++ compilers; without a C++ compiler, only the first path is built. ``pip install`` runs it
(``hatch_build.py``). In a source tree, ``python -m outblas.runtime.native_build`` puts the extension into the package.
It needs a C compiler and Python's headers, but neither CUDA nor torch.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from outblas.core.errors import ToolchainMissing

#: Where the extension is put: Python finds it as ``outblas.dispatch._native``.
PACKAGE = Path(str(resources.files("outblas"))) / "dispatch"
SOURCES = PACKAGE / "csrc"
#: The stable ABI of Python 3.10: one file serves every supported version. The sources use nothing of a later one.
LIMITED_API = "0x030A0000"
EXTENSION_NAME = "_native.abi3.so"
_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
#: The C source that needs those in C++, through which torch's exceptions pass.
_NEEDS_CXX = "products.c"


def source_id() -> str:
    """Return an identifier of the C and C++ sources; empty if they are not installed.

    An extension that was built from other sources is not used.
    """
    files = sorted(f for kind in ("*.[ch]", "*.cpp") for f in SOURCES.glob(kind))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16] if files else ""


def command(output: Path, compiler: str | None = None, cxx_objects: Sequence[Path] = ()) -> list[str]:
    """Return the command line of the C compiler for the extension, one argument an element.

    Args:
        compiler: the compiler, split as a shell does: ``"ccache gcc"`` gives two arguments. None: the environment's
            ``CC`` if it is not empty, else ``cc``.
        cxx_objects: object files of all C++ sources, see :func:`cxx_commands`; empty: they are left out.
    """
    include = sysconfig.get_paths()["include"]
    sources = [f for f in sorted(SOURCES.glob("*.c")) if cxx_objects or f.name != _NEEDS_CXX]
    with_cxx = ["-DOUTBLAS_CXX", *map(str, cxx_objects)] if cxx_objects else []
    return [
        *shlex.split(compiler or os.environ.get("CC") or "cc"), "-std=gnu11", *_FLAGS, "-shared", "-pthread",
        f"-DPy_LIMITED_API={LIMITED_API}", f'-DOUTBLAS_SOURCE_ID="{source_id()}"', f"-I{include}",
        *(str(f) for f in sources), *with_cxx, "-ldl", *(["-lstdc++"] if with_cxx else []), "-o", str(output),
    ]  # fmt: skip


def cxx_commands(folder: Path) -> dict[Path, list[str]]:
    """Return object file in ``folder`` -> the command line of the C++ compiler: the environment's ``CXX``, or ``c++``.

    All commands are run for :func:`command`.
    """
    compiler = [*shlex.split(os.environ.get("CXX") or "c++"), "-std=c++17", *_FLAGS, "-pthread", "-c"]
    objects = {folder / f"{f.stem}.o": f for f in sorted(SOURCES.glob("*.cpp"))}
    return {output: [*compiler, str(source), "-o", str(output)] for output, source in objects.items()}


def build(
    folder: Path = PACKAGE, compiler: str | None = None, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Compile the extension and return its path ``folder/_native.abi3.so``; the file appears whole or not at all.

    Args:
        folder: where it is written, an existing directory; by default the installed package, which finds it there.
        compiler: command of the C compiler, e.g. ``"ccache gcc"``; None: the environment's ``CC``, else ``cc``.
        report: receives a line if what is in C++ is left out, e.g. because no C++ compiler is there.

    Raises:
        ToolchainMissing: no compiler, no Python.h, or a Python that the stable ABI does not serve. The error has the
            compiler's first error.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _failed("a free-threaded Python has no stable ABI", "a Python with a GIL")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".native-") as scratch:
        made, commands = Path(scratch) / EXTENSION_NAME, cxx_commands(Path(scratch))
        try:
            reason = next(filter(None, map(_why_not_compiled, commands.values())), "")
            for linked in [()] if reason else [tuple(commands), ()]:  # optional, as is C++'s own library
                done = subprocess.run(command(made, compiler, linked), capture_output=True, text=True)
                if done.returncode == 0:
                    break
        except OSError as error:
            raise _failed(f"the C compiler cannot be run ({error})", "cc, or the compiler in CC") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise _failed(
                f"outblas.dispatch._native does not compile: {lines[0] if lines else 'no message'}",
                "Python.h, a C11 compiler",
            )
        if reason or not linked:
            report(f"the C++ parts are left out: {reason or 'the C++ library cannot be linked'}")
        return made.replace(folder / EXTENSION_NAME)


def main() -> int:
    """Build the extension in the package's folder. Return 0, or 2 with one line on standard error if that fails."""
    try:
        print(f"built {build(report=print)}")
    except ToolchainMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _why_not_compiled(cxx_command: list[str]) -> str:
    """Compile a C++ source; return why that cannot be done here, in a line."""
    try:
        done = subprocess.run(cxx_command, capture_output=True, text=True)
    except OSError as error:
        return f"the C++ compiler cannot be run ({error})"
    wrong = [line for line in done.stderr.splitlines() if "error" in line]
    return (wrong or ["no message"])[0] if done.returncode else ""


def _failed(wrong: str, expected: str) -> ToolchainMissing:
    return ToolchainMissing(wrong, expected, "install a C compiler and the Python headers; the extension is optional")


if __name__ == "__main__":
    sys.exit(main())
