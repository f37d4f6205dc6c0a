"""Open cuBLAS and cuBLASLt through ctypes, with the types of the functions that this package calls."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.core.rivals import CallFromC


class Algo(ctypes.Structure):
    """An opaque cublasLtMatmulAlgo_t, 64 bytes."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """A cublasLtMatmulHeuristicResult_t, 96 bytes.

    Its fields: ``algo`` (an :class:`Algo`), ``workspace`` (bytes that it needs), ``state`` (0: usable), ``waves``.
    """

    _fields_ = [("algo", Algo), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)]


@functools.cache
def open_cublas() -> ctypes.CDLL:
    """Return libcublas with typed functions. Raises ToolchainMissing if it is not installed."""
    open_cublaslt()  # libcublas needs it: load it first, from the same place
    lib = _load("cublas")
    gemm = [c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_int]
    gemm += [c_void_p, c_int, c_int, c_void_p, c_void_p, c_int, c_int, c_int, c_int]
    signatures: dict[str, list[Any]] = {
        "cublasCreate_v2": [POINTER(c_void_p)],
        "cublasDestroy_v2": [c_void_p],
        "cublasSetStream_v2": [c_void_p, c_void_p],
        "cublasSetWorkspace_v2": [c_void_p, c_void_p, c_size_t],
        "cublasGemmEx": gemm,
    }
    return _typed(lib, signatures)


@functools.cache
def open_cublaslt() -> ctypes.CDLL:
    """Return libcublasLt with typed functions. Raises ToolchainMissing if it is not installed."""
    lib = _load("cublasLt")
    pointer = c_void_p
    signatures: dict[str, list[Any]] = {
        "cublasLtCreate": [POINTER(c_void_p)],
        "cublasLtDestroy": [pointer],
        "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
        "cublasLtMatmulDescDestroy": [pointer],
        "cublasLtMatmulDescSetAttribute": [pointer, c_int, pointer, c_size_t],
        "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatrixLayoutDestroy": [pointer],
        "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, c_int, pointer, c_size_t],
        "cublasLtMatmulAlgoGetHeuristic": [pointer] * 7 + [c_int, POINTER(HeuristicResult), POINTER(c_int)],
        "cublasLtMatmulAlgoConfigGetAttribute": [pointer, c_int, pointer, c_size_t, POINTER(c_size_t)],
        "cublasLtMatmul": [pointer] * 14 + [c_size_t, pointer],
    }
    _typed(lib, signatures)
    lib.cublasLtGetVersion.argtypes, lib.cublasLtGetVersion.restype = [], c_size_t
    return lib


def native_call(lib: ctypes.CDLL, name: str, arguments: tuple[Any, ...], owner: Any) -> CallFromC:
    """Return a call of a library's function for a caller in C.

    Args:
        arguments: its arguments: integers, ``c_void_p`` or results of ``byref``.
        owner: what keeps the handles among them alive.
    """
    address = ctypes.cast(getattr(lib, name), c_void_p).value or 0
    return CallFromC(name, address, tuple(map(_word, arguments)), (arguments, owner))


def _word(argument: Any) -> int:
    """Return an argument as an integer: a number, the value of a pointer, or the address of a ``byref``."""
    if isinstance(argument, int):
        return argument
    return argument.value or 0 if isinstance(argument, c_void_p) else ctypes.addressof(argument._obj)


def _typed(lib: ctypes.CDLL, signatures: dict[str, list[Any]]) -> ctypes.CDLL:
    """Set the argument types of functions that return a status; return the library."""
    for name, arguments in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    return lib


def _load(name: str) -> ctypes.CDLL:
    """Return the library that this process has loaded, else the one of the wheels, else the system's.

    Raises:
        ToolchainMissing: it was not found.
    """
    tried: list[str] = []
    for path in (*_mapped(name), *_wheels(name), f"lib{name}.so.13", f"lib{name}.so.12"):
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(str(error))
    raise ToolchainMissing(
        f"lib{name} cannot be loaded ({tried[0].splitlines()[0][:120]})",
        "the cuBLAS that a CUDA build of torch brings",
        install_hint("gpu"),
    )


def _mapped(name: str) -> list[str]:
    """Return the paths of this library in the memory map of the process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted(set(re.findall(rf"(/\S*/lib{name}\.so[.\d]*)$", maps.read_text(errors="replace"), re.M)))


def _wheels(name: str) -> list[str]:
    """Return the paths of this library in NVIDIA's wheels."""
    roots = [Path(folder or ".", "nvidia") for folder in sys.path]
    patterns = (f"cu13/lib/lib{name}.so.*", f"cublas/lib/lib{name}.so.*")
    return [str(path) for root in roots for pattern in patterns for path in sorted(root.glob(pattern))]
