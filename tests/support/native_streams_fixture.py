"""Plans of cuBLASLt and sizes of workspaces, for tests of the native table."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.cublas import WORKSPACE_BYTES, BlasShape, LtPlan
from support.native_fixture import FakeCuda

NEED = COUNTERS_BYTES + WORKSPACE_BYTES
ADDRESS = 1 << 30


def fake_plan(cuda: FakeCuda, problem: Problem) -> LtPlan:
    """A plan of the recording cuBLASLt, whose handles are 1, 2, 3, ..."""
    handles = iter(range(1, 99))

    def create(into: Any, *_: Any) -> int:
        into._obj.value = next(handles)
        return 0

    product = cuda.library.cublasLtMatmul
    product.argtypes, product.restype = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    library = SimpleNamespace(
        cublasLtMatmulDescCreate=create,
        cublasLtMatrixLayoutCreate=create,
        cublasLtMatmulDescSetAttribute=lambda *_: 0,
        cublasLtMatmul=product,
    )
    owner: Any = SimpleNamespace(_lib=library, _handle=ctypes.c_void_p(98), _workspace=0)
    return LtPlan(owner, BlasShape.of(problem))
