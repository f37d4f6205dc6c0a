"""C++ kernels for torch's products (:mod:`outblas.dispatch.aten_override`), which run without the interpreter's lock.

For a product that they have not met, they ask Python, which decides once. They call torch through its stable C
interface for extensions (since torch 2.10) and four C++ functions of two tensors. All functions are looked up by name
in the running torch. If one is missing, or the extension has no such kernels, the Python kernels do everything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from outblas.runtime import native
from outblas.runtime.torch_state import loaded_function, raw_key

#: Dispatch key -> what torch calls its device: by number, and as the namespace of its kernels; mangled.
_DEVICES = {"CPU": (0, "3cpu"), "CUDA": (1, "4cuda")}
#: A dispatch key that no CPU or CUDA tensor has. C++ calls the Python kernels through it.
ASK_PYTHON_KEY = "FPGA"
_TWO_TENSORS = "ERKNS_6TensorES3_"
_FUNCTIONS = {
    "library_init": "aoti_torch_library_init_impl",
    "library_impl": "torch_library_impl",
    "library_delete": "aoti_torch_delete_library_object",
    "delete_tensor": "aoti_torch_delete_tensor_object",
    "dtype": "aoti_torch_get_dtype",
    "dim": "aoti_torch_get_dim",
    "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides",
    "data_ptr": "aoti_torch_get_data_ptr",
    "device_type": "aoti_torch_get_device_type",
    "device_index": "aoti_torch_get_device_index",
    "empty_strided": "aoti_torch_empty_strided",
    "float16": "aoti_torch_dtype_float16",
    "bfloat16": "aoti_torch_dtype_bfloat16",
    "mm_redispatch": "_ZN2at4_ops2mm10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_",
    "bmm_redispatch": "_ZN2at4_ops3bmm10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_",
}
_CUDA_FUNCTIONS = {
    "current_stream": "aoti_torch_get_current_cuda_stream",
    "guard_create": "aoti_torch_create_cuda_guard",
    "guard_delete": "aoti_torch_delete_cuda_guard",
}
#: Of a torch whose tensors may have names (up to 2.12).
_NAMES_FUNCTIONS = {"has_names": "_ZN2at4impl9has_namesEPKN3c1010TensorImplE"}


class NativeCall(NamedTuple):
    """A call that the C++ kernels do not know; Python answers it once, for all calls like it.

    Attributes:
        products: the C++ kernels that asked.
        sent: the call's key, opaque bytes.
    """

    products: Any
    sent: bytes

    def learn(self, element_bytes: int, launch: Any, product: Any) -> None:
        """Tell the C++ kernels how to answer calls like this one from now on.

        Args:
            element_bytes: size of an element of the operands, bytes.
            launch: a :class:`outblas.runtime.launch.PreparedLaunch`; None: no kernel.
            product: a :class:`outblas.runtime.cublaslt.PreparedAlgorithm`; None: no algorithm. Both None: torch
                answers.
        """
        self.products.learn(self.sent, element_bytes, launch, product)

    def lend(self, device: int | None, stream: int, workspace: Any) -> None:
        """Give the C++ kernels the workspace of a stream; they keep it alive.

        Args:
            device: CUDA index of the device; None: that of the CPU.
            stream: raw stream.
            workspace: torch tensor.
        """
        index = -1 if device is None else device
        self.products.lend(index, stream, workspace.data_ptr(), workspace.nbytes, workspace)


def open_products(key: str) -> tuple[Any, str]:
    """Open the C++ kernels of a dispatch key. Return (kernels, ""), or (None, the reason in one line).

    Example: without a C++ compiler at the build, it returns ``(None, "outblas.dispatch._native was built without a C++
    compiler")``.

    Args:
        key: ``"CPU"`` or ``"CUDA"``.
    """
    reason = native.why_not()
    if reason:
        return None, reason
    make = getattr(native.extension(), "Products", None)
    if make is None:
        return None, "outblas.dispatch._native was built without a C++ compiler"
    try:
        ask_python_keys()
        return make(native.LIBCUDA, _DEVICES[key][0], _addresses(key)), ""
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:  # another torch, another driver
        return None, f"the kernels in outblas.dispatch._native cannot be used here: {error}"


def ask_python_keys() -> int:
    """Return the raw set of dispatch keys that holds :data:`ASK_PYTHON_KEY` alone.

    Raises:
        RuntimeError: torch has no such key. An older torch may raise AttributeError or TypeError instead.
    """
    return raw_key(ASK_PYTHON_KEY)


def current_call(products: Any) -> NativeCall | None:
    """Return the call that C++ passed to this thread's Python kernel; None if C++ did not make it.

    Args:
        products: the kernels of :func:`open_products`.
    """
    sent = products.sent()
    return None if sent is None else NativeCall(products, sent)


def _addresses(key: str) -> dict[str, int]:
    """Return name in ``csrc/products.h`` -> address, from the libraries that torch has loaded.

    Raises:
        AttributeError: a function is missing.
        OSError: a library is missing.
    """
    namespace = _DEVICES[key][1]
    kernels = {"mm": f"_ZN2at{namespace}2mm{_TWO_TENSORS}", "bmm": f"_ZN2at{namespace}3bmm{_TWO_TENSORS}"}
    wanted = {**_FUNCTIONS, **(_NAMES_FUNCTIONS if hasattr(torch.Tensor, "has_names") else {})}
    found = _found("libtorch_cpu.so", wanted if key == "CUDA" else {**wanted, **kernels})
    if key == "CUDA":
        found |= _found("libtorch_cuda.so", {**_CUDA_FUNCTIONS, **kernels})
    return found


def _found(library: str, names: dict[str, str]) -> dict[str, int]:
    return {name: loaded_function(library, symbol) for name, symbol in names.items()}
