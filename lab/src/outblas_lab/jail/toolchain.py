"""Find CUDA's headers and nvcc (the wheels' or CUDA_HOME's) and CUTLASS's headers.

CUTLASS comes from the package nvidia-cutlass, or from CUTLASS_DIR.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint

_DO = f"{install_hint('free')}, or set CUDA_HOME"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler, as :func:`find_nvcc` returns it.

    Attributes:
        library_folder: folder of libcudart.
    """

    path: Path
    version: str
    library_folder: Path
    cudart: str


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """Return a tuple of the folders of CUDA's own headers, for NVRTC and nvcc.

    Example: ``(Path(".../nvidia/cu13/include"), Path(".../nvidia/cu13/include/cccl"))``.

    Raises:
        ToolchainMissing: no cuda_fp16.h in the wheels, in CUDA_HOME or in /usr/local/cuda.
    """
    found = [root for root in _roots() if (root / "include" / "cuda_fp16.h").is_file()]
    whole = [root for root in found if any((each / "crt" / "mma.h").is_file() for each in _headers(root))]
    for root in (*whole, *found):  # a wheel alone may lack what the next place has
        return tuple(_headers(root))
    raise ToolchainMissing(
        "the CUDA headers (cuda_fp16.h) were not found", "the wheels nvidia-cuda-runtime, -cccl and -crt", _DO
    )


@functools.cache
def find_nvcc() -> Nvcc:
    """Return nvcc of the wheels, else of CUDA_HOME, /usr/local/cuda or PATH.

    Raises:
        ToolchainMissing: no nvcc starts, libcudart is not beside it, or its host code has no C++ compiler.
    """
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise ToolchainMissing("no C++ compiler was found", "g++ on PATH", "install g++; nvcc needs it for host code")
    for root in _roots():
        program = root / "bin" / "nvcc"
        if not os.access(program, os.X_OK):
            continue
        for folder in (root / "lib", root / "lib64", root / "targets" / "x86_64-linux" / "lib"):
            names = sorted((each.name for each in folder.glob("libcudart.so.*")), key=len)
            if names:
                return Nvcc(program, _version(program), folder, names[0])
    raise ToolchainMissing("nvcc or libcudart is missing", "the wheels nvidia-cuda-nvcc and nvidia-cuda-runtime", _DO)


def _roots() -> list[Path]:
    wheels = [found for folder in sys.path for found in sorted(Path(folder or ".", "nvidia").glob("cu[0-9]*"))]
    wheels += [
        found for folder in sys.path for found in [Path(folder or ".", "nvidia", "cuda_runtime")] if found.is_dir()
    ]
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    return [*wheels, *named, Path("/usr/local/cuda"), *([Path(on_path).resolve().parent.parent] if on_path else [])]


def _headers(root: Path) -> list[Path]:
    """Its own, and those of the wheels beside it (CUDA 12 has one wheel a folder)."""
    include = root / "include"
    beside = ("cuda_cccl", "cuda_crt") if root.name == "cuda_runtime" else ()
    folders = [include, include / "cccl", *(root.parent / name / "include" for name in beside)]
    return [folder for folder in folders if folder.is_dir()]


def _version(program: Path) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainMissing(f"{program} cannot be run ({error})", "a working nvcc", _DO) from error
    if done.returncode:
        raise ToolchainMissing(f"{program} --version failed with status {done.returncode}", "a working nvcc", _DO)
    return done.stdout.strip().splitlines()[-1]


#: The first release whose Hopper mainloops are what kernels of today include, and the first not known.
OLDEST_CUTLASS, NEWEST_CUTLASS = (3, 5), (5, 0)
_DO_CUTLASS = "pip install 'nvidia-cutlass>=3.5,<5', or set CUTLASS_DIR to a checkout"


@functools.cache
def _located_cutlass(directory: str | None) -> tuple[Path, str]:
    tried = [Path(directory, "include"), Path(directory)] if directory else []
    if not directory:
        tried = [Path(folder or ".", "cutlass_library", "source", "include") for folder in sys.path]
    for include in tried:
        if (include / "cutlass" / "version.h").is_file():
            text = (include / "cutlass" / "version.h").read_text(errors="replace")
            parts = [re.search(rf"#define\s+CUTLASS_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
            if None in parts:
                wrong = f"{include}/cutlass/version.h defines no version"
                raise ToolchainMissing(wrong, "CUTLASS_MAJOR, CUTLASS_MINOR and CUTLASS_PATCH", _DO_CUTLASS)
            return include.resolve(), ".".join(part[1] for part in parts if part)
    where = f"CUTLASS_DIR={directory}" if directory else "the package nvidia-cutlass"
    raise ToolchainMissing(f"CUTLASS headers were not found in {where}", "include/cutlass/version.h there", _DO_CUTLASS)


def locate_cutlass() -> tuple[Path, str]:
    """Return (include folder, version) of CUTLASS, such as ``(Path(".../source/include"), "4.2.0")``.

    Raises:
        ToolchainMissing: not installed, or of another version than 3.5 to 4.x.
    """
    include, version = _located_cutlass(os.environ.get("CUTLASS_DIR") or None)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST_CUTLASS <= numbers < NEWEST_CUTLASS:
        raise ToolchainMissing(f"CUTLASS {version} in {include} is unsupported", "3.5 or later, before 5", _DO_CUTLASS)
    return include, version


def cutlass_folders() -> list[Path]:
    """Return a list of the folders to include from: the library's, then that of its utilities where it is there.

    Raises:
        ToolchainMissing: as :func:`locate_cutlass`.
    """
    include, _ = locate_cutlass()
    tools = include.parent / "tools" / "util" / "include"
    return [include, *([tools] if tools.is_dir() else [])]
