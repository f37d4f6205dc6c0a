"""cuBLAS and cuBLASLt through ctypes: the libraries that torch has loaded, every status checked.

Row-major C = A B is computed as column-major C^T = B^T A^T. In cuBLAS' words (m, n, k) = (N, M, K):

======  ==========================  =======================
layout  first operand: our B        second operand: our A
======  ==========================  =======================
TN      op T, ld K (stored K x N)   op N, ld K (stored K x M)
NN      op N, ld N (stored N x K)   op N, ld K (stored K x M)
======  ==========================  =======================

and C^T is N x M with ld N. ("stored" as column-major sees it.) The scale type (that of alpha and beta)
always equals the compute type: float with 32F, half with 16F.
Numbers of the enumerations: cublas_api.h, cublasLt.h and library_types.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem

#: Scratch memory that every baseline may use, bytes.
WORKSPACE_BYTES = 32 * 1024 * 1024

_R_32F, _R_16F, _R_16BF = 0, 2, 14  # cudaDataType
_COMPUTE_16F, _COMPUTE_32F = 64, 68  # cublasComputeType_t
_OP_N, _OP_T = 0, 1  # cublasOperation_t
_GEMM_DEFAULT = -1  # cublasGemmAlgo_t
_DESC_TRANSA, _DESC_TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_PREF_MAX_WORKSPACE, _PREF_MIN_ALIGNMENT = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t: A, B, C, D
#: cublasLtMatmulAlgoConfigAttributes_t: name -> (number, type).
_ALGO_FIELDS: dict[str, tuple[int, Any]] = {
    "id": (0, c_int),
    "tile": (1, c_uint32),
    "splitk": (2, c_int),
    "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32),
    "custom": (5, c_uint32),
    "stages": (6, c_uint32),
    "inner": (7, c_uint16),
    "cluster": (8, c_uint16),
}
_STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, 64 bytes."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, 96 bytes."""

    _fields_ = [
        ("algo", Algo),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class BlasShape:
    """What cuBLAS is told of a problem (see the table above).

    Attributes:
        m, n, k, op_first, ld_first, ld_second, ld_out: of the column-major product.
        dtype: cudaDataType of all three operands. compute, scale: compute and scale types.
    """

    m: int
    n: int
    k: int
    op_first: int
    ld_first: int
    ld_second: int
    ld_out: int
    dtype: int
    compute: int
    scale: int

    @classmethod
    def of(cls, problem: Problem) -> BlasShape:
        transposed = problem.layout == "TN"
        half = problem.acc == "fp16"
        return cls(
            m=problem.n,
            n=problem.m,
            k=problem.k,
            op_first=_OP_T if transposed else _OP_N,
            ld_first=problem.k if transposed else problem.n,
            ld_second=problem.k,
            ld_out=problem.n,
            dtype=_R_16F if problem.dtype == "fp16" else _R_16BF,
            compute=_COMPUTE_16F if half else _COMPUTE_32F,
            scale=_R_16F if half else _R_32F,
        )

    def scalars(self) -> tuple[Any, Any]:
        """(alpha, beta) = (1, 0) in the scale type, as C objects to be passed by reference."""
        if self.scale == _R_16F:
            return c_uint16(0x3C00), c_uint16(0)
        return c_float(1.0), c_float(0.0)


class Cublas:
    """One cublasHandle_t with its own workspace.

    Args:
        workspace: address of :data:`WORKSPACE_BYTES` bytes on the current device; it must outlive this object.

    Raises:
        ToolchainMissing: no libcublas. DeviceError: a call failed.
    """

    def __init__(self, workspace: int) -> None:
        self._lib = _cublas()
        self._workspace = workspace
        self._stream: int | None = None
        self._handle = c_void_p()
        check_status("cublasCreate", self._lib.cublasCreate_v2(byref(self._handle)))

    def gemm(self, shape: BlasShape, scalars: tuple[Any, Any], a: int, b: int, c: int, stream: int) -> None:
        """Enqueue cublasGemmEx with the default algorithm; a, b, c: our operands' addresses."""
        lib, handle = self._lib, self._handle
        if stream != self._stream:
            check_status("cublasSetStream", lib.cublasSetStream_v2(handle, stream))
            # cublasSetStream drops the user's workspace, so it comes second.
            check_status("cublasSetWorkspace", lib.cublasSetWorkspace_v2(handle, self._workspace, WORKSPACE_BYTES))
            self._stream = stream
        s = shape
        check_status(
            "cublasGemmEx",
            lib.cublasGemmEx(
                handle, s.op_first, _OP_N, s.m, s.n, s.k,
                byref(scalars[0]), b, s.dtype, s.ld_first, a, s.dtype, s.ld_second,
                byref(scalars[1]), c, s.dtype, s.ld_out, s.compute, _GEMM_DEFAULT,
            ),
        )  # fmt: skip

    def close(self) -> None:
        """Destroy the handle; harmless when done twice."""
        if self._handle:
            self._lib.cublasDestroy_v2(self._handle)
            self._handle = c_void_p()


class CublasLt:
    """One cublasLtHandle_t with a workspace (0: every call brings its own); see :class:`Cublas` for the rest."""

    def __init__(self, workspace: int = 0) -> None:
        self._lib = _cublaslt()
        self._workspace = workspace
        self._handle = c_void_p()
        check_status("cublasLtCreate", self._lib.cublasLtCreate(byref(self._handle)))

    def plan(self, problem: Problem) -> LtPlan:
        """Descriptors of a problem; close them after use."""
        return LtPlan(self, BlasShape.of(problem))

    def close(self) -> None:
        """Destroy the handle; harmless when done twice."""
        if self._handle:
            self._lib.cublasLtDestroy(self._handle)
            self._handle = c_void_p()


class LtPlan:
    """Matmul and layout descriptors of one problem."""

    def __init__(self, owner: CublasLt, shape: BlasShape) -> None:
        self._owner, self._lib = owner, owner._lib
        self.shape = shape
        self._alpha, self._beta = shape.scalars()
        self._desc, self._first, self._second, self._out = (c_void_p() for _ in range(4))
        created = self._lib.cublasLtMatmulDescCreate(byref(self._desc), shape.compute, shape.scale)
        check_status("cublasLtMatmulDescCreate", created)
        for attribute, op in ((_DESC_TRANSA, shape.op_first), (_DESC_TRANSB, _OP_N)):
            value = c_int(op)
            check_status(
                "cublasLtMatmulDescSetAttribute",
                self._lib.cublasLtMatmulDescSetAttribute(self._desc, attribute, byref(value), 4),
            )
        stored = (shape.k, shape.m) if shape.op_first == _OP_T else (shape.m, shape.k)
        self._layout(self._first, *stored, shape.ld_first)
        self._layout(self._second, shape.k, shape.n, shape.ld_second)
        self._layout(self._out, shape.m, shape.n, shape.ld_out)

    def heuristic(self, count: int, alignment: int = 256) -> list[HeuristicResult]:
        """Algorithms that cuBLASLt proposes, best first by its own reckoning; at least one.

        Args:
            count: how many to ask for. alignment: bytes that every operand's address is a multiple of.

        Raises:
            DeviceError: the call failed or returned no usable algorithm.
        """
        lib, preference = self._lib, c_void_p()
        check_status("cublasLtMatmulPreferenceCreate", lib.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            space, bytes_ = c_uint64(WORKSPACE_BYTES), c_uint32(alignment)
            settings: list[tuple[int, Any, int]] = [(_PREF_MAX_WORKSPACE, space, 8)]
            settings += [(attribute, bytes_, 4) for attribute in _PREF_MIN_ALIGNMENT]
            for attribute, value, size in settings:
                check_status(
                    "cublasLtMatmulPreferenceSetAttribute",
                    lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(value), size),
                )
            results, found = (HeuristicResult * count)(), c_int(0)
            check_status(
                "cublasLtMatmulAlgoGetHeuristic",
                lib.cublasLtMatmulAlgoGetHeuristic(
                    self._owner._handle, self._desc, self._first, self._second, self._out, self._out,
                    preference, count, results, byref(found),
                ),
            )  # fmt: skip
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        usable = [r for r in results[: found.value] if r.state == 0 and r.workspace <= WORKSPACE_BYTES]
        if not usable:
            raise DeviceError(
                f"cublasLtMatmulAlgoGetHeuristic has no algorithm for {self.shape}",
                "at least one",
                "use another baseline",
            )
        return usable

    def matmul(self, algo: Algo, a: int, b: int, c: int, stream: int, workspace: int | None = None) -> None:
        """Enqueue one product with the given algorithm; a, b, c: our operands' addresses.

        Args:
            workspace: address of :data:`WORKSPACE_BYTES` bytes of the call's own, 0: none; None: the handle's.

        Raises:
            DeviceError: cuBLASLt refused it.
        """
        space = self._owner._workspace if workspace is None else workspace
        check_status(
            "cublasLtMatmul",
            self._lib.cublasLtMatmul(
                self._owner._handle, self._desc, byref(self._alpha), b, self._first, a, self._second,
                byref(self._beta), c, self._out, c, self._out,
                byref(algo), space, WORKSPACE_BYTES if space else 0, stream,
            ),
        )  # fmt: skip

    def numbers(self) -> tuple[int, ...]:
        """(address of cublasLtMatmul, handle, descriptor, layouts of the first operand, the second and the output, bits
        of alpha, bits of beta), good for as long as this object lives: what a caller in C needs of it."""
        function = ctypes.cast(self._lib.cublasLtMatmul, c_void_p)
        handles = (function, self._owner._handle, self._desc, self._first, self._second, self._out)
        bits = (int.from_bytes(bytes(scalar), sys.byteorder) for scalar in (self._alpha, self._beta))
        return (*(handle.value or 0 for handle in handles), *bits)

    def close(self) -> None:
        """Destroy the descriptors; harmless when done twice."""
        for layout in (self._first, self._second, self._out):
            if layout:
                self._lib.cublasLtMatrixLayoutDestroy(layout)
                layout.value = None
        if self._desc:
            self._lib.cublasLtMatmulDescDestroy(self._desc)
            self._desc.value = None

    def _layout(self, into: c_void_p, rows: int, cols: int, ld: int) -> None:
        check_status(
            "cublasLtMatrixLayoutCreate",
            self._lib.cublasLtMatrixLayoutCreate(byref(into), self.shape.dtype, rows, cols, ld),
        )


def describe(algo: Algo) -> str:
    """The algorithm's configuration, e.g. ``id=66 tile=20 splitk=1 ...``; a field it lacks is left out."""
    words, written = [], c_size_t()
    for name, (number, kind) in _ALGO_FIELDS.items():
        value = kind()
        status = _cublaslt().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algo), number, byref(value), ctypes.sizeof(value), byref(written)
        )
        if status == 0:
            words.append(f"{name}={value.value}")
    return " ".join(words)


def version() -> str:
    """Version of the loaded cuBLASLt, e.g. ``13.1.0``."""
    number = int(_cublaslt().cublasLtGetVersion())
    # 13.x and later count 10000 to a major; 12.x and before too, from 11 on (110000).
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check_status(call: str, status: int) -> None:
    """Raise :class:`DeviceError` for a cublasStatus_t that is not CUBLAS_STATUS_SUCCESS."""
    if status:
        raise DeviceError(
            f"{call} failed with CUBLAS_STATUS_{_STATUS.get(status, status)}",
            "CUBLAS_STATUS_SUCCESS",
            "check the GPU, its driver and the problem's alignment",
        )


@functools.cache
def _cublas() -> ctypes.CDLL:
    _cublaslt()  # libcublas needs it: load it first, from the same place
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
def _cublaslt() -> ctypes.CDLL:
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


def _typed(lib: ctypes.CDLL, signatures: dict[str, list[Any]]) -> ctypes.CDLL:
    for name, arguments in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    return lib


def _load(name: str) -> ctypes.CDLL:
    """The library that this process has loaded already, else the one of the wheels, else the system's.

    Raises:
        ToolchainMissing: there is none.
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
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted(set(re.findall(rf"(/\S*/lib{name}\.so[.\d]*)$", maps.read_text(errors="replace"), re.M)))


def _wheels(name: str) -> list[str]:
    roots = [Path(folder or ".", "nvidia") for folder in sys.path]
    patterns = (f"cu13/lib/lib{name}.so.*", f"cublas/lib/lib{name}.so.*")
    return [str(path) for root in roots for pattern in patterns for path in sorted(root.glob(pattern))]
