"""cuBLAS and cuBLASLt through ctypes: the libraries that torch has loaded. Every status is checked.

Row-major C = A B is computed as column-major C^T = B^T A^T. For cuBLAS, (m, n, k) = (N, M, K)::

    layout  first operand: our B        second operand: our A
    TN      op T, ld K (stored K x N)   op N, ld K (stored K x M)
    NN      op N, ld N (stored N x K)   op N, ld K (stored K x M)

C^T is N x M with ld N. "Stored" is the column-major view. The scale type (of alpha and beta) equals the compute type:
float for 32F, half for 16F.

Enumeration values are from cublas_api.h, cublasLt.h and library_types.h of CUDA 12 and 13.
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
from outblas.core.rivals import CallFromC

#: Size of the scratch memory that every baseline may use, bytes.
WORKSPACE_BYTES = 32 * 1024 * 1024

_R_32F, _R_16F, _R_16BF = 0, 2, 14  # cudaDataType
_COMPUTE_16F, _COMPUTE_32F = 64, 68  # cublasComputeType_t
_OP_N, _OP_T = 0, 1  # cublasOperation_t
_GEMM_DEFAULT = -1  # cublasGemmAlgo_t
_DESC_TRANSA, _DESC_TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_PREF_MAX_WORKSPACE, _PREF_MIN_ALIGNMENT = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t: A, B, C, D
#: cublasLtMatmulAlgoConfigAttributes_t: name -> (number, type).
_ALGO_FIELDS: dict[str, tuple[int, Any]] = {
    "id": (0, c_int), "tile": (1, c_uint32), "splitk": (2, c_int), "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32), "custom": (5, c_uint32), "stages": (6, c_uint32), "inner": (7, c_uint16),
    "cluster": (8, c_uint16),
}  # fmt: skip
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


@dataclass(frozen=True)
class BlasShape:
    """Arguments of cuBLAS for a problem, in column-major terms (see the table above).

    Attributes:
        m: rows of the column-major output, N of the problem.
        n: columns of the output, M of the problem.
        k: extent that is summed over.
        op_first: cublasOperation_t of the first operand, our B.
        ld_first: leading dimension of the first operand, elements.
        ld_second: leading dimension of the second operand, our A.
        ld_out: leading dimension of the output.
        dtype: cudaDataType of all three operands.
        compute: cublasComputeType_t.
        scale: cudaDataType of alpha and beta.
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
        """Return the arguments for a problem.

        Example: of ``Problem(128, 256, 64, "TN", "fp16", "fp32")``, m is 256, n 128, k 64, op_first 1 (transposed),
        ld_first and ld_second 64, ld_out 256, dtype 2, compute 68, scale 0. For NN, op_first is 0 and ld_first 256.
        """
        transposed = problem.layout == "TN"
        half = problem.acc == "fp16"
        return cls(
            m=problem.n, n=problem.m, k=problem.k, op_first=_OP_T if transposed else _OP_N,
            ld_first=problem.k if transposed else problem.n, ld_second=problem.k, ld_out=problem.n,
            dtype=_R_16F if problem.dtype == "fp16" else _R_16BF, compute=_COMPUTE_16F if half else _COMPUTE_32F,
            scale=_R_16F if half else _R_32F,
        )  # fmt: skip

    def scalars(self) -> tuple[Any, Any]:
        """Return (alpha, beta) = (1, 0) in the scale type, as ctypes objects.

        They are ``(c_float(1.0), c_float(0.0))``; with fp16 accumulation ``(c_uint16(0x3C00), c_uint16(0))``.
        """
        if self.scale == _R_16F:
            return c_uint16(0x3C00), c_uint16(0)
        return c_float(1.0), c_float(0.0)


class Cublas:
    """A cublasHandle_t with a workspace. :meth:`gemm` enqueues a product; :meth:`close` ends it. It is no context
    manager.

    Args:
        workspace: address of :data:`WORKSPACE_BYTES` bytes (32 MiB) on the current device; must outlive this object.

    Raises:
        ToolchainMissing: libcublas is not installed.
        DeviceError: a call failed.
    """

    def __init__(self, workspace: int) -> None:
        self._lib = open_cublas()
        self._workspace = workspace
        self._stream: int | None = None
        self._handle = c_void_p()
        check_status("cublasCreate", self._lib.cublasCreate_v2(byref(self._handle)))

    def gemm(self, shape: BlasShape, scalars: tuple[Any, Any], a: int, b: int, c: int, stream: int) -> None:
        """Enqueue cublasGemmEx with the default algorithm.

        Args:
            scalars: of :meth:`BlasShape.scalars`.
            a: address of our A.
            b: address of our B.
            c: address of our C, overwritten.
            stream: raw CUstream.

        Raises:
            DeviceError: a call failed.
        """
        self._use_stream(stream)
        check_status("cublasGemmEx", self._lib.cublasGemmEx(*self._arguments(shape, scalars, a, b, c)))

    def native(self, shape: BlasShape, scalars: tuple[Any, Any], a: int, b: int, c: int, stream: int) -> CallFromC:
        """Return the call of :meth:`gemm` for a caller in C. It is valid until the handle gets another stream."""
        self._use_stream(stream)
        return native_call(self._lib, "cublasGemmEx", self._arguments(shape, scalars, a, b, c), self)

    def _arguments(self, s: BlasShape, scalars: tuple[Any, Any], a: int, b: int, c: int) -> tuple[Any, ...]:
        return (
            self._handle, s.op_first, _OP_N, s.m, s.n, s.k,
            byref(scalars[0]), b, s.dtype, s.ld_first, a, s.dtype, s.ld_second,
            byref(scalars[1]), c, s.dtype, s.ld_out, s.compute, _GEMM_DEFAULT,
        )  # fmt: skip

    def _use_stream(self, stream: int) -> None:
        lib, handle = self._lib, self._handle
        if stream != self._stream:
            check_status("cublasSetStream", lib.cublasSetStream_v2(handle, stream))
            # cublasSetStream resets the workspace, so the workspace is set second.
            check_status("cublasSetWorkspace", lib.cublasSetWorkspace_v2(handle, self._workspace, WORKSPACE_BYTES))
            self._stream = stream

    def close(self) -> None:
        """Destroy the handle. Later calls do nothing."""
        if self._handle:
            self._lib.cublasDestroy_v2(self._handle)
            self._handle = c_void_p()


class CublasLt:
    """A cublasLtHandle_t. :meth:`plan` describes a problem; :meth:`close` ends the handle. It is no context manager.

    Args:
        workspace: address of :data:`WORKSPACE_BYTES` bytes on the current device, which must outlive this object. With
            0 every call brings its own.

    Raises:
        ToolchainMissing: libcublasLt is not installed.
        DeviceError: a call failed.
    """

    def __init__(self, workspace: int = 0) -> None:
        self._lib = open_cublaslt()
        self._workspace = workspace
        self._handle = c_void_p()
        check_status("cublasLtCreate", self._lib.cublasLtCreate(byref(self._handle)))

    def plan(self, problem: Problem) -> LtPlan:
        """Return the descriptors of a problem. Close them after use."""
        return LtPlan(self, BlasShape.of(problem))

    def close(self) -> None:
        """Destroy the handle. Later calls do nothing."""
        if self._handle:
            self._lib.cublasLtDestroy(self._handle)
            self._handle = c_void_p()


class LtPlan:
    """The matmul descriptor and the layout descriptors of one problem, made by :meth:`CublasLt.plan`.

    :meth:`heuristic` lists algorithms, :meth:`matmul` enqueues a product, :meth:`numbers` is for C. :meth:`close` or
    the last reference ends it, before its :class:`CublasLt`. It is no context manager.
    """

    def __init__(self, owner: CublasLt, shape: BlasShape) -> None:
        self._owner, self._lib = owner, owner._lib
        self._desc, self._first, self._second, self._out = (c_void_p() for _ in range(4))
        self.shape = shape
        self._alpha, self._beta = shape.scalars()
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
        """Return a list of algorithms that cuBLASLt proposes, best first by its own estimate; at least one.

        The algorithm is ``result.algo``; ``result.workspace`` is what it needs, bytes. A result is a
        :class:`HeuristicResult`.

        Args:
            alignment: alignment of every operand's address, bytes.

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
                f"cublasLtMatmulAlgoGetHeuristic returned no algorithm for {self.shape}",
                "at least one algorithm",
                "use another baseline",
            )
        return usable

    def matmul(self, algo: Algo, a: int, b: int, c: int, stream: int, workspace: int | None = None) -> None:
        """Enqueue one product with a given algorithm.

        Args:
            workspace: address of :data:`WORKSPACE_BYTES` bytes for this call; 0: none; None: the handle's.

        Raises:
            DeviceError: cuBLASLt refused the call.
        """
        space = self._owner._workspace if workspace is None else workspace
        check_status("cublasLtMatmul", self._lib.cublasLtMatmul(*self._arguments(algo, a, b, c, stream, space)))

    def native(self, algo: Algo, a: int, b: int, c: int, stream: int) -> CallFromC:
        """Return the call of :meth:`matmul` for a caller in C, with the handle's workspace."""
        arguments = self._arguments(algo, a, b, c, stream, self._owner._workspace)
        return native_call(self._lib, "cublasLtMatmul", arguments, self)

    def _arguments(self, algo: Algo, a: int, b: int, c: int, stream: int, space: int) -> tuple[Any, ...]:
        return (
            self._owner._handle, self._desc, byref(self._alpha), b, self._first, a, self._second,
            byref(self._beta), c, self._out, c, self._out,
            byref(algo), space, WORKSPACE_BYTES if space else 0, stream,
        )  # fmt: skip

    def numbers(self) -> tuple[int, ...]:
        """Return what a caller in C needs: eight ints, valid while this object lives.

        Alpha and beta are bit patterns: 0x3F800000 (1.0 in fp32) and 0; with fp16 accumulation 0x3C00 and 0.

        Returns:
            (address of cublasLtMatmul, handle, descriptor, layout of our B, layout of our A, layout of the output,
            alpha,
                beta).
        """
        function = ctypes.cast(self._lib.cublasLtMatmul, c_void_p)
        handles = (function, self._owner._handle, self._desc, self._first, self._second, self._out)
        bits = (int.from_bytes(bytes(scalar), sys.byteorder) for scalar in (self._alpha, self._beta))
        return (*(handle.value or 0 for handle in handles), *bits)

    def close(self) -> None:
        """Destroy the descriptors. Later calls do nothing."""
        for layout in (self._first, self._second, self._out):
            if layout:
                self._lib.cublasLtMatrixLayoutDestroy(layout)
                layout.value = None
        if self._desc:
            self._lib.cublasLtMatmulDescDestroy(self._desc)
            self._desc.value = None

    __del__ = close

    def _layout(self, into: c_void_p, rows: int, cols: int, ld: int) -> None:
        check_status(
            "cublasLtMatrixLayoutCreate",
            self._lib.cublasLtMatrixLayoutCreate(byref(into), self.shape.dtype, rows, cols, ld),
        )


def describe(algo: Algo) -> str:
    """Return an algorithm's configuration as text. Fields that it lacks are left out.

    Example: ``id=66 tile=10 splitk=1 reduction=0 swizzle=0 custom=1 stages=35 inner=0 cluster=4``, always in this
    order.

    Raises:
        ToolchainMissing: libcublasLt is not installed.
    """
    words, written = [], c_size_t()
    for name, (number, kind) in _ALGO_FIELDS.items():
        value = kind()
        status = open_cublaslt().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algo), number, byref(value), ctypes.sizeof(value), byref(written)
        )
        if status == 0:
            words.append(f"{name}={value.value}")
    return " ".join(words)


def rounds_partial_sums(algorithm: str) -> bool:
    """Return True if an algorithm adds the parts of a split K in half precision, or may do so.

    ``CUBLASLT_REDUCTION_SCHEME_NONE`` (0) has no parts, and ``COMPUTE_TYPE`` (2) adds them in fp32. ``INPLACE`` (1) and
    ``OUTPUT_TYPE`` (4) add them in the type of C.
    """
    return not {"reduction=0", "reduction=2"} & set(algorithm.split())


def version() -> str:
    """Return the version of the loaded cuBLASLt, e.g. ``13.1.0``. Raises ToolchainMissing if it is not installed."""
    number = int(open_cublaslt().cublasLtGetVersion())
    # cublasLtGetVersion counts 10000 to a major version, since 11 (110000).
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check_status(call: str, status: int) -> None:
    """Raise DeviceError unless a cublasStatus_t is CUBLAS_STATUS_SUCCESS (0); ``call`` names the function."""
    if status:
        raise DeviceError(
            f"{call} failed with CUBLAS_STATUS_{_STATUS.get(status, status)}",
            "CUBLAS_STATUS_SUCCESS",
            "check the GPU, its driver and the problem's alignment",
        )


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
        "the cuBLAS that a CUDA build of torch includes",
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
