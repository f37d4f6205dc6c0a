"""``torch.nn.Linear`` with a bias as one kernel, where a CUDA graph is captured.

Only Python can replace ``aten::addmm``, which costs each eager call some microseconds. The replay of a graph pays no
host time. So the method that stands here for ``torch.nn.Linear.forward`` asks for a kernel during captures only. Torch
computes in all other calls. They cost the host one comparison more, or with a bias some tenths of a microsecond.

A method is replaced at once for all threads; torch's table of kernels is not, so it stays as it is during captures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch import device_registry
from outblas.dispatch.linear import kernel_adds_bias, run_fused
from outblas.kernels.epilogue import Epilogue
from outblas.runtime.fused_launch import Extra

_BIAS = Epilogue(bias=True)


class BiasedLayers:
    """The replacement of ``torch.nn.Linear.forward``, active from :meth:`install` to :meth:`remove`.

    Example: after ``b = BiasedLayers()``, ``b.install()`` and the capture of a model with five biased layers whose
    kernels are loaded (:func:`outblas.prepare`), ``b.ours`` is 5.

    Attributes:
        ours: products with a bias that became one kernel of a graph.
    """

    def __init__(self) -> None:
        self.ours = 0
        self._on = False
        self._lock = threading.Lock()
        self._torchs: Callable[..., Any] | None = None
        self._method = _method(self._product)

    def install(self) -> None:
        """Replace the method, or use the one that could not be removed."""
        self._on = True
        if self._torchs is None:
            self._torchs = torch.nn.Linear.forward
            torch.nn.Linear.forward = self._method  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        """Restore torch's method. If another package has replaced ours meanwhile, ours stays and changes nothing."""
        self._on = False
        if self._torchs is not None and torch.nn.Linear.forward is self._method:
            torch.nn.Linear.forward = self._torchs  # type: ignore[method-assign,assignment]
            self._torchs = None

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
        if not self._on or x.device.type != device_registry.DEVICE_TYPE:
            return None
        if not torch.cuda.is_current_stream_capturing() or not kernel_adds_bias(x):
            return None
        result = run_fused(x, weight, Extra(bias), _BIAS, None)
        if result is not None:
            with self._lock:
                self.ours += 1
        return result


def _method(product: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Return a ``forward`` for layers that asks ``product`` first if there is a bias.

    TorchScript and torch.compile compile it as torch's: both leave out what they see to be constant.
    """

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        if bias is not None and not torch.jit.is_scripting() and not torch.compiler.is_compiling():
            weight = self.weight
            found = product(input, weight, bias)
            return torch.nn.functional.linear(input, weight, bias) if found is None else found
        return torch.nn.functional.linear(input, self.weight, bias)

    return forward
