"""Our kernels in the place of torch's for ``aten::mm`` and ``aten::bmm`` of one dispatch key.

All products of two matrices that a program makes get there, those of torch.matmul, torch.mm, ``@``, F.linear and
nn.Linear without a bias, and of the gradients of all of these; autograd, autocast, torch.func and modes have done
their part above. ``aten::addmm`` (a bias) stays torch's, see :mod:`outblas.dispatch.linear`, and so does what writes
to an ``out=``.

A product may have been made by anything, so no promise about ``b`` is taken from the environment.

Where the native extension has kernels for torch's dispatcher (:mod:`outblas.dispatch.aten_native`) they are put there:
what is torch's costs next to nothing then, and what is ours, once it is known, no Python. What they meet for the first
time they ask of the kernels here, which else take torch's place themselves.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch import device_registry
from outblas.dispatch.aten_native import ASK_PYTHON_KEY, NativeCall, ask_python_keys, current_call, open_products
from outblas.dispatch.aten_products import our_bmm, our_mm, torch_bmm, torch_mm
from outblas.dispatch.promises import promise_free_option

_Ours = Callable[[torch.Tensor, torch.Tensor, int, "NativeCall | None"], "torch.Tensor | None"]
_Theirs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def as_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass that has had its say above, as a tensor. One that has its say below the dispatcher
    (``__torch_dispatch__``) stays what it is, and torch's."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return tensor
    if getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Override:
    """In place from :meth:`install` to :meth:`remove`.

    Args:
        key: dispatch key: of the device whose kernels are replaced.
    """

    def __init__(self, key: str = "CUDA") -> None:
        self._key = key
        self._library: Any = None
        self._lock = threading.RLock()  # a signal's handler may multiply meanwhile
        self._ours = self._torchs = self._option = 0
        self._products: Any = None
        self.why_python = ""

    def install(self) -> None:
        """What the environment says of PDL is read here. No other thread may be at a product meanwhile: torch changes
        its table of kernels without a lock that calls would take."""
        self._option = promise_free_option()
        # Torch warns of the first kernel in a process that is replaced, which is what was asked for; on stderr where
        # it is replaced from C++: so the first is replaced from here in any case.
        self._library = self._registered(self._key)
        products, self.why_python = self._native()
        if products is not None:
            self._library._destroy()
            self._library = self._registered(ASK_PYTHON_KEY)
            self._begin(products)

    def remove(self) -> None:
        """torch's own kernels are back; as for :meth:`install`, while nobody multiplies."""
        if self._products is not None:
            self._products.remove()
        if self._forget in device_registry.on_library_replaced:
            device_registry.on_library_replaced.remove(self._forget)
        self._library._destroy()
        self._library = None

    def counts(self) -> dict[str, int]:
        """Products so far by whom they were computed: ``ours`` and ``torchs``."""
        native = {} if self._products is None else self._products.counts()
        with self._lock:
            return {"ours": self._ours + native.get("ours", 0), "torchs": self._torchs + native.get("torchs", 0)}

    @property
    def kernels(self) -> str:
        """What takes the place of torch's: ``C++``, or ``Python`` and why."""
        return f"Python: {self.why_python}" if self.why_python else "C++"

    def _native(self) -> tuple[Any, str]:
        """(kernels in C++ for this key, "") or (None, why there are none)."""
        opened, reason = open_products(self._key)
        if opened is None or self._products is None:
            return opened, reason
        return self._products, ""  # with its counts

    def _begin(self, products: Any) -> None:
        """Kernels in C++ take the place of torch's; those in Python are there to be asked. Where torch, or kernels of
        ours for another key, do not let them, Python's do it all."""
        try:
            products.forget()  # libraries may have been replaced meanwhile
            products.install(self._key, self._option, ask_python_keys())
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
        """The library of torch's that holds the kernels in Python under a dispatch key."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl("mm", self._kernel(our_mm, torch_mm), key)
            library.impl("bmm", self._kernel(our_bmm, torch_bmm), key)
        return library

    def _kernel(self, our: _Ours, their: _Theirs) -> _Theirs:
        def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            call = None if self._products is None else current_call(self._products)
            a, b = as_plain_tensor(a), as_plain_tensor(b)
            result = our(a, b, self._option, call)
            with self._lock:
                if result is None:
                    self._torchs += 1
                else:
                    self._ours += 1
            return their(a, b) if result is None else result

        return kernel
