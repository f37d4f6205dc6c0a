"""The fast path of ``outblas.matmul``: a table in C that repeats earlier decisions of the dispatch.

It is optional. If ``outblas.dispatch._native`` is not built or does not fit this torch, Python serves every call.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.switches import is_off
from outblas.runtime.cublas import check_status
from outblas.runtime.driver import driver
from outblas.runtime.native_build import source_id
from outblas.runtime.torch_state import torch_state

LIBCUDA = "libcuda.so.1"
#: The remedy if the extension is not built.
BUILD = f"run python -m {source_id.__module__}"


def why_not() -> str:
    """Return why the extension cannot be used, and the remedy, in one line; empty if it can."""
    if is_off("OUTBLAS_NATIVE"):
        return "switched off by OUTBLAS_NATIVE"
    reason = why_not_built()
    return f"{reason}; {BUILD}" if reason else ""


def why_not_built() -> str:
    """Return in one line why the extension is not there; empty if it is there and built from these sources."""
    try:
        built = extension()
    except ImportError as error:
        return f"outblas.dispatch._native is not built ({error})"
    return "" if source_id() in ("", built.SOURCE_ID) else "outblas.dispatch._native was built from different sources"


def open_table(libcuda: str = LIBCUDA, **replaced: Any) -> tuple[Any, str]:
    """Open the native table; imports torch. Return (table, ""), or (None, the reason) if it cannot be opened.

    Args:
        libcuda: file name of the driver's library.
        replaced: hooks that take the place of torch's functions, by name (see ``csrc/object.h``).
    """
    reason = why_not()
    if reason:
        return None, reason
    try:
        return extension().Table(libcuda, **{**_hooks(), **replaced}), ""
    except (AttributeError, OSError) as error:  # another torch, another driver
        return None, f"outblas.dispatch._native cannot be used here: {error}"


def tracing_check() -> Callable[[], bool]:
    """Return a function that says whether torch traces; a traced call must not reach the table.

    The table itself detects every kind of tracing but dynamo's. If possible, the function asks for dynamo alone, which
    costs less.
    """
    import torch

    everything: Callable[[], bool] = torch.compiler.is_compiling
    dynamo: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", everything)
    return everything if _compiling() is None else dynamo


def _compiling() -> dict[str, Any] | None:
    """Return the namespace that holds the flag which ``torch.compiler.is_compiling`` reads outside dynamo.

    Return None if this torch reads something else.
    """
    import torch

    asked, found = torch.compiler.is_compiling, vars(torch.compiler)
    code = getattr(asked, "__code__", None)
    reads = set() if code is None else {*code.co_names} - {"torch", "jit", "is_scripting"}  # False in eager Python
    return found if reads == {"_is_compiling_flag"} and asked.__globals__ is found else None


def extension() -> ModuleType:
    """Import the compiled module; raise ImportError if it is not built."""
    return importlib.import_module("outblas.dispatch._native")


def _hooks() -> dict[str, Any]:
    """Return torch's own functions that the extension calls; raise AttributeError if torch lacks one."""
    import torch

    core, base = torch._C, torch._C.TensorBase
    return {
        "exchange": getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # from torch 2.10 on
        "state": torch_state(),
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "data_ptr": base.data_ptr,
        "is_neg": base.is_neg,
        "has_names": getattr(base, "has_names", None),  # up to torch 2.12
        "is_inference": base.is_inference,
        "inference_mode": torch.is_inference_mode_enabled,
        "spares_inference": _spares_inference(),
        "stride": base.stride,
        "watchers": (
            core._is_any_autocast_enabled,
            core._len_torch_function_stack,
            core._len_torch_dispatch_stack,
            core._is_tracing,
        ),
        "compiling": _compiling(),
        "environment": getattr(os.environ, "_data", None),
        "grad_enabled": torch.is_grad_enabled,
        "requires_grad": base.requires_grad,
        "forward_ad": vars(torch.autograd.forward_ad),
        # A CPU build lacks these two; its table remembers no kernel and never calls them.
        "current_device": getattr(core, "_cuda_getDevice", None),
        "current_stream": getattr(core, "_cuda_getCurrentRawStream", None),
        "empty": _empty(),
        "increment_version": _increment_version(),
        "product": torch.matmul,
        "refused": raise_refused,
    }


def _empty() -> Any:
    """Return ``(shape, strides, dtype) -> CUDA tensor`` on the current device; Inductor's allocator if torch has it."""
    import torch

    fast = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    if fast is not None:
        return fast

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")

    return empty


def _increment_version() -> Any:
    """Return ``(tensors) -> None`` that increments their versions.

    Older versions of torch take one tensor at a time.
    """
    import torch

    core = torch._C._increment_version

    def one_by_one(tensors: tuple[Any, ...]) -> None:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)

    try:
        core((torch.empty(0, device="cpu"),))
    except TypeError:
        return one_by_one
    return core


def _spares_inference() -> bool:
    """Return True if torch's increment of versions skips inference tensors, which have no version."""
    import torch

    with torch.inference_mode():
        tensor = torch.empty(0, device="cpu")
    try:
        torch._C._increment_version((tensor,))
    except (RuntimeError, TypeError):
        return False
    return True


def raise_refused(call: str, status: int) -> None:
    """Raise DeviceError for a failed call of the driver or of cuBLASLt.

    Args:
        call: its name, e.g. ``cublasLtMatmul``.
    """
    if call.startswith("cublas"):
        check_status(call, status)
    try:
        name = driver().CUresult(status).name
    except ValueError:  # newer than the bindings
        name = "an unknown error"
    raise DeviceError(f"{call} failed with {name} ({status})", "CUDA_SUCCESS", "check the launch and its operands")
