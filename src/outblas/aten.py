"""Our kernels in the place of torch's for ``aten::mm`` and ``aten::bmm`` of one dispatch key.

All products of two matrices that a program makes get there, those of torch.matmul, torch.mm, ``@``, F.linear and
nn.Linear without a bias, and of the gradients of all of these; autograd, autocast, torch.func and modes have done
their part above. ``aten::addmm`` (a bias) stays torch's, see :mod:`outblas.affine`, and so does what writes to an
``out=``.

A product may have been made by anything, so no promise about ``b`` is taken from the environment.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from outblas.allowed import promise_free_option
from outblas.below import our_bmm, our_mm, torch_bmm, torch_mm


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

    def install(self) -> None:
        """What the environment says of PDL is read here. No other thread may be at a product meanwhile: torch changes
        its table of kernels without a lock that calls would take."""
        self._option = promise_free_option()
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that a kernel is replaced is what was asked for
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl("mm", self._kernel(our_mm, torch_mm), self._key)
            library.impl("bmm", self._kernel(our_bmm, torch_bmm), self._key)
        self._library = library

    def remove(self) -> None:
        """torch's own kernels are back; as for :meth:`install`, while nobody multiplies."""
        self._library._destroy()
        self._library = None

    def counts(self) -> dict[str, int]:
        """Products so far by whom they were computed: ``ours`` and ``torchs``."""
        with self._lock:
            return {"ours": self._ours, "torchs": self._torchs}

    def _kernel(self, our: Callable[[Any, Any, int], Any], their: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def kernel(a: Any, b: Any) -> Any:
            result = our(a, b, self._option)
            with self._lock:
                if result is None:
                    self._torchs += 1
                else:
                    self._ours += 1
            return their(a, b) if result is None else result

        return kernel
