"""OutBLAS: half-precision GEMM kernels for NVIDIA GPUs, searched, proven right and timed honestly.

``import outblas`` loads neither torch nor CUDA; ``outblas.matmul`` does when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas.errors import OutblasError
from outblas.problem import Problem

if TYPE_CHECKING:
    from outblas.capturing import capture
    from outblas.dispatch import explain, matmul, status, use_library

__version__ = "0.1.0"
__all__ = ["OutblasError", "Problem", "__version__", "capture", "explain", "matmul", "status", "use_library"]


def __getattr__(name: str) -> Any:
    if name in ("explain", "matmul", "status", "use_library"):
        from outblas import dispatch

        globals()[name] = found = getattr(dispatch, name)  # the next access is a plain one
        return found
    if name == "capture":
        from outblas.capturing import capture

        globals()[name] = capture
        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
