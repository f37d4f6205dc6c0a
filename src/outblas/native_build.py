"""Builds ``outblas._native``, the hot path of ``outblas.matmul``, with the system's C compiler.

``pip install`` does it by itself (``hatch_build.py``); in a source tree ``python -m outblas.native_build`` puts the
extension beside this file. It needs a C compiler and Python's headers, and nothing of CUDA or torch.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from outblas.errors import ToolchainMissing

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "csrc"
#: The stable ABI of Python 3.10: one file serves that and every later version.
LIMITED_API = "0x030A0000"
NAME = "_native.abi3.so"
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def source_id() -> str:
    """What identifies the sources; an extension built from others is not used. Empty where they are not installed."""
    files = sorted(SOURCES.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16] if files else ""


def command(output: Path, compiler: str | None = None) -> list[str]:
    """The compiler's command line. ``compiler``: None: the environment's ``CC``, else ``cc``."""
    include = sysconfig.get_paths()["include"]
    return [
        *shlex.split(compiler or os.environ.get("CC") or "cc"), *_FLAGS,
        f"-DPy_LIMITED_API={LIMITED_API}", f'-DOUTBLAS_SOURCE_ID="{source_id()}"', f"-I{include}",
        *(str(f) for f in sorted(SOURCES.glob("*.c"))), "-ldl", "-o", str(output),
    ]  # fmt: skip


def build(folder: Path = PACKAGE, compiler: str | None = None) -> Path:
    """Compile the extension into ``folder``; the file appears whole or not at all.

    Raises:
        ToolchainMissing: no compiler, no Python.h, or a Python that the stable ABI does not serve; with the
            compiler's first error.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _failed("a free-threaded Python has no stable ABI", "a Python with a GIL")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".native-") as scratch:
        made = Path(scratch) / NAME
        try:
            done = subprocess.run(command(made, compiler), capture_output=True, text=True)
        except OSError as error:
            raise _failed(f"the C compiler cannot be run ({error})", "cc, or the one that CC names") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise _failed(
                f"outblas._native does not compile: {lines[0] if lines else 'no message'}", "Python.h, a C11 compiler"
            )
        return made.replace(folder / NAME)


def main() -> int:
    """Build in place; exit 2 with one line where that fails."""
    try:
        print(f"built {build()}")
    except ToolchainMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _failed(wrong: str, expected: str) -> ToolchainMissing:
    return ToolchainMissing(wrong, expected, "install a C compiler and Python's headers, or do without: it is optional")


if __name__ == "__main__":
    sys.exit(main())
