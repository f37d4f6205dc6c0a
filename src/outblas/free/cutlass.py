"""CUTLASS and CuTe headers: of the package nvidia-cutlass, or of CUTLASS_DIR."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

from outblas.errors import ToolchainMissing

#: The first release whose Hopper mainloops are what kernels of today include, and the first not known.
OLDEST, NEWEST = (3, 5), (5, 0)
_DO = "pip install 'nvidia-cutlass>=3.5,<5', or set CUTLASS_DIR to a checkout"


@functools.cache
def _located(directory: str | None) -> tuple[Path, str]:
    tried = [Path(directory, "include"), Path(directory)] if directory else []
    if not directory:
        tried = [Path(folder or ".", "cutlass_library", "source", "include") for folder in sys.path]
    for include in tried:
        if (include / "cutlass" / "version.h").is_file():
            return include.resolve(), _version(include)
    where = f"CUTLASS_DIR={directory}" if directory else "the package nvidia-cutlass"
    raise ToolchainMissing(f"CUTLASS's headers not found in {where}", "include/cutlass/version.h there", _DO)


def locate() -> tuple[Path, str]:
    """(include folder, version) of CUTLASS.

    Raises:
        ToolchainMissing: not installed, or of another version than 3.5 to 4.x.
    """
    include, version = _located(os.environ.get("CUTLASS_DIR") or None)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        raise ToolchainMissing(f"CUTLASS {version} in {include}", "3.5 or later, before 5", _DO)
    return include, version


def folders() -> list[Path]:
    """Folders to include from: the library's, and that of its utilities where it is there. Raises as :func:`locate`."""
    include, _ = locate()
    tools = include.parent / "tools" / "util" / "include"
    return [include, *([tools] if tools.is_dir() else [])]


def _version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text(errors="replace")
    found = {name: re.search(rf"#define\s+CUTLASS_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")}
    parts = [match[1] for match in found.values() if match]
    if len(parts) != 3:
        raise ToolchainMissing(f"{include}/cutlass/version.h names no version", "CUTLASS_MAJOR, _MINOR, _PATCH", _DO)
    return ".".join(parts)
