"""Replace torch's kernels for ``aten::mm``, ``aten::bmm`` and ``aten::_grouped_mm`` of one dispatch key.

Every product of two matrices arrives there: torch.matmul, torch.mm, ``@``, F.linear and nn.Linear without a bias, and
the gradients of all of these. Autograd, autocast, torch.func and modes have already run. ``aten::addmm`` (a bias) and
products with ``out=`` stay with torch.

``aten::_grouped_mm``, the product of a mixture of experts, is replaced, too (:mod:`outblas.dispatch.grouped`).

The origin of ``b`` is unknown, so the environment's promise of constant weights is not used.

If the native extension has C++ kernels (:mod:`outblas.dispatch.aten_native`), they are installed, also for
``outblas::mm`` of compiled code. A product for torch then costs almost nothing, and a known product of the library
needs no Python. The Python kernels here answer for new products. Without the extension they replace torch's kernels
themselves.

With the guarantee ``batch_invariant``, ``aten::addmm``, ``aten::baddbmm`` and true batches are replaced, too
(:mod:`outblas.dispatch.invariant_operators`). With ``OUTBLAS_FUSED=1`` and another guarantee,
``aten::addmm`` may be one kernel (:mod:`outblas.dispatch.fusion.biased_product`). It is in Python, so it costs the host
some microseconds, also where torch computes.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outblas.core.switches import is_on
from outblas.dispatch import (
    device_registry,
    invariant_operators,
    torch_op,  # noqa: F401 - the kernels of outblas::mm in Python come before those in C++, which replace them
)
from outblas.dispatch.aten_native import ASK_PYTHON_KEY, NativeCall, ask_python_keys, current_call, open_products
from outblas.dispatch.aten_products import HALF_DTYPES, our_bmm, our_mm, torch_addmm, torch_bmm, torch_mm
from outblas.dispatch.call_option import CallOption, option_without_promise
from outblas.dispatch.fused_layer import FUSED_VARIABLE
from outblas.dispatch.fusion.biased_product import biased_product
from outblas.dispatch.grouped.grouped_product import grouped_kernel
from outblas.dispatch.grouped.transformers_experts import TransformersExperts
from outblas.dispatch.guarantees.guarantee import Guarantee, process_guarantee
from outblas.dispatch.product_operands import as_plain

_Ours = Callable[[torch.Tensor, torch.Tensor, CallOption, "NativeCall | None"], "torch.Tensor | None"]
_Theirs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Files of torch's own Python kernels begin so.
TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


class Override:
    """The replacement of torch's kernels, active from :meth:`install` to :meth:`remove`.

    Example: ``o = Override("CPU")``, ``o.install()``, ``a @ b``, then ``o.counts()`` returns ``{"ours": 0, "torchs":
    1}``, as no library is for a CPU. The constructor changes nothing.

    Args:
        key: dispatch key of the device whose kernels are replaced, ``"CUDA"`` or ``"CPU"``.
    """

    def __init__(self, key: str = "CUDA") -> None:
        self._key = key
        self._library: Any = None
        self._further: Any = None
        self._grouped: Any = None
        self._experts = TransformersExperts(functools.partial(self.count, True))
        self._replaced: set[str] = set()
        self._lock = threading.RLock()  # a signal's handler may multiply meanwhile
        self._ours = self._torchs = 0
        self._option = CallOption()
        self._products: Any = None
        self.why_python = ""

    def why_not(self, guarantee: Guarantee) -> str:
        """Return in one line why :meth:`install` under a guarantee would drop another package's kernel; or empty.

        Operators that this package has replaced already do not count.
        """
        names = {"mm", "bmm"} | ({"addmm", "baddbmm"} if guarantee == "batch_invariant" else set())
        names |= {"addmm"} if is_on(FUSED_VARIABLE) else set()
        reasons = (why_not_replaced(name, self._key) for name in sorted(names - self._replaced))
        return next(filter(None, reasons), "")

    def install(self) -> None:
        """Replace torch's kernels; read ``OUTBLAS_PDL``, ``OUTBLAS_FUSED`` and the process's guarantee once.

        No other thread may compute a product meanwhile: torch changes its table of kernels without a lock.
        """
        self._option = option_without_promise()
        try:
            # Torch warns about the first kernel that a process replaces. From C++ the warning goes to stderr and cannot
            # be filtered, so Python always replaces the first one.
            self._library = self._registered(self._key)
            products, self.why_python = self._native()
            if products is not None:
                self._library._destroy()
                self._library = self._registered(ASK_PYTHON_KEY)
                self._begin(products)
            # Replace the operators that the guarantee or ``OUTBLAS_FUSED`` needs beside ``mm`` and ``bmm``.
            if process_guarantee() == "batch_invariant":
                if self._products is None or self.why_python:  # up to torch 2.12 Python registers an operator once
                    self._library._destroy()
                    self._library = self._implemented({"mm": self._kernel(our_mm, torch_mm)}, self._key)
                operators = (invariant_operators.bmm, invariant_operators.addmm, invariant_operators.baddbmm)
                self._further = self._implemented({each.__name__: self._counted(each) for each in operators}, self._key)
            elif is_on(FUSED_VARIABLE):
                self._further = self._implemented({"addmm": self._biased}, self._key)
            self._grouped = self._grouped_library()
            self._experts.install()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore torch's own kernels; as for :meth:`install`, no other thread may compute a product meanwhile.

        It does nothing before :meth:`install`, or a second time.
        """
        if self._library is None:
            return
        self._experts.remove()
        for library in (self._further, self._grouped):
            if library is not None:
                library._destroy()
        self._further = self._grouped = None
        if self._products is not None:
            self._products.remove()
        if self._forget in device_registry.on_library_replaced:
            device_registry.on_library_replaced.remove(self._forget)
        self._library._destroy()
        self._library = None
        self._replaced.clear()

    def counts(self) -> dict[str, int]:
        """Return the products so far as ``{"ours": n, "torchs": m}``: those by this package, and those by torch."""
        native = {} if self._products is None else self._products.counts()
        with self._lock:
            return {"ours": self._ours + native.get("ours", 0), "torchs": self._torchs + native.get("torchs", 0)}

    def count(self, ours: bool, products: int = 1) -> None:
        """Count products by this package, or by torch."""
        with self._lock:
            if ours:
                self._ours += products
            else:
                self._torchs += products

    @property
    def kernels(self) -> str:
        """The kernels that replace torch's: ``C++``, or ``Python: `` and the reason."""
        return f"Python: {self.why_python}" if self.why_python else "C++"

    def _native(self) -> tuple[Any, str]:
        """Return (C++ kernels of this key, ""), or (None, the reason)."""
        opened, reason = open_products(self._key)
        if opened is None or self._products is None:
            return opened, reason
        return self._products, ""  # with its counts

    def _begin(self, products: Any) -> None:
        """Install the C++ kernels; the Python kernels then only answer their questions.

        If that fails, the Python kernels replace torch's themselves, and ``why_python`` says why.
        """
        try:
            products.forget()  # libraries may have been replaced meanwhile
            products.install(self._key, self._option.code, ask_python_keys())
        except RuntimeError as error:
            self.why_python = str(error)
            self._library._destroy()
            self._library = self._registered(self._key)
            return
        self._products = products
        device_registry.on_library_replaced.append(self._forget)

    def _forget(self) -> None:
        self._products.forget()

    def _registered(self, key: str) -> Any:
        """Register the Python kernels under a dispatch key; return the torch library that holds them."""
        return self._implemented({"mm": self._kernel(our_mm, torch_mm), "bmm": self._kernel(our_bmm, torch_bmm)}, key)

    def _implemented(self, kernels: dict[str, Callable[..., torch.Tensor]], key: str, **further: Any) -> Any:
        library = torch.library.Library("aten", "IMPL")
        further |= {"allow_override": True} if takes_overrides() else {}  # those of torch itself
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, **further)
                self._replaced.add(name)
        return library

    def _grouped_library(self) -> Any:
        """Replace ``aten::_grouped_mm``, unless another package has; return the torch library that holds the kernel.

        Older torches lack the operator, or a way to its own kernel.
        """
        if not hasattr(torch, "_grouped_mm") or not hasattr(torch.library, "get_kernel"):
            return None
        if why_not_replaced("_grouped_mm", self._key):
            return None
        theirs = torch.library.get_kernel("aten::_grouped_mm", self._key)

        def kernel(
            keyset: Any, a: torch.Tensor, w: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
        ) -> torch.Tensor:
            self._experts.install()  # transformers may have been imported meanwhile
            result, ours = grouped_kernel(keyset, a, w, offs, bias, out_dtype, theirs)
            self.count(ours)
            return result

        return self._implemented({"_grouped_mm": kernel}, self._key, with_keyset=True)

    def _counted(self, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a batch-invariant operator for plain tensors; half-precision products count as this package's."""

        def kernel(*operands: torch.Tensor, **factors: Any) -> torch.Tensor:
            result = operator(*map(as_plain, operands), **factors)
            self.count(result.dtype in HALF_DTYPES and result.numel() > 0)
            return result

        return kernel

    def _biased(self, *operands: torch.Tensor, **factors: Any) -> torch.Tensor:
        operands = tuple(map(as_plain, operands))
        result = biased_product(*operands, **factors)
        self.count(result is not None)
        return torch_addmm(*operands, **factors) if result is None else result

    def _kernel(self, our: _Ours, their: _Theirs) -> _Theirs:
        def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            call = None if self._products is None else current_call(self._products)
            a, b = as_plain(a), as_plain(b)
            result = our(a, b, self._option, call)
            self.count(result is not None)
            return their(a, b) if result is None else result

        return kernel


def why_not_replaced(name: str, key: str) -> str:
    """Return in one line why a kernel of ``aten::`` must not be replaced; empty if it may.

    torch keeps all kernels of an operator, the newest first. The oldest one is its own. Newer ones of its own, such as
    the Triton kernel of ``aten::bmm`` in torch 2.13, do not count.

    Args:
        name: the operator, such as ``mm``.
    """
    lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
    places = [
        line.partition(": registered at ")[2] for line in lines if line.startswith((f"{key}:", f"{key} (inactive):"))
    ]
    where = next((place.partition(" :: ")[0] for place in places[:-1] if not place.startswith(TORCH_FOLDER)), "")
    if not where and not takes_overrides() and f"aten/{name}/{key}" in torch.library._impls:
        where = "an unknown place"  # torch would raise an error
    text = f"another package has replaced aten::{name} for {key} (at {where}); call outblas.matmul instead"
    return text if where else ""


def takes_overrides() -> bool:
    """Return True if ``torch.library`` has an option to replace a kernel that Python has registered."""
    return "allow_override" in inspect.signature(torch.library.Library.impl).parameters
