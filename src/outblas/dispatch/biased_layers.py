"""``torch.nn.Linear`` with a bias as one kernel, where a CUDA graph is captured.

Only Python can replace ``aten::addmm``, which costs each eager call some microseconds. The replay of a graph pays no
host time. So ``torch.nn.Linear.forward`` is replaced while a graph is captured, and eager calls are as without OutBLAS.

A method is replaced at once for all threads. Threads that capture nothing get torch's result meanwhile. Torch's table
of kernels stays as it is, because a change of it may crash another thread. torch.compile has no guard on the method, so
nothing is compiled anew.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch.fused_layer import is_captured, run_biased

#: Module of torch's own ``forward``. That of another package has a task of its own, and stays.
_HOME = "torch.nn.modules.linear"


class BiasedLayers:
    """The replacement during captures, active from :meth:`install` to :meth:`remove`.

    Example: after ``b = BiasedLayers()``, ``b.install()`` and the capture of a model with five biased layers whose
    kernels are loaded (:func:`outblas.prepare`), ``b.ours`` is 5.

    Attributes:
        ours: products with a bias that became one kernel of a graph.
    """

    def __init__(self) -> None:
        self.ours = 0
        self._on = False
        self._lock = threading.Lock()
        self._graphs: set[int] = set()
        self._torchs: Callable[..., Any] | None = None
        #: Name of a method of ``CUDAGraph`` -> (the method before, ours).
        self._methods: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def install(self) -> None:
        """Follow the captures of ``torch.cuda.CUDAGraph`` from now on."""
        self._on, graph = True, torch.cuda.CUDAGraph
        if not self._methods:
            begin, end = graph.capture_begin, graph.capture_end
            self._methods = {
                "capture_begin": (begin, self._begin_method(begin)),
                "capture_end": (end, self._end_method(end)),
            }
            for name, (_, method) in self._methods.items():
                setattr(graph, name, method)

    def remove(self) -> None:
        """Follow no capture any more, and end the replacement; torch computes the rest of an open capture.

        If another package has replaced a method of ``CUDAGraph`` meanwhile, ours stay below it and change nothing.
        """
        self._on, graph = False, torch.cuda.CUDAGraph
        if all(getattr(graph, name) is ours for name, (_, ours) in self._methods.items()):
            for name, (before, _) in self._methods.items():
                setattr(graph, name, before)
            self._methods.clear()
        with self._lock:
            self._graphs.clear()
            self._restore()

    def _begin_method(self, begin: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(begin)
        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> None:
            begin(graph, *arguments, **options)
            if self._on:
                with self._lock:
                    self._graphs.add(id(graph))
                    self._replace()

        return capture_begin

    def _end_method(self, end: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            with self._lock:
                self._graphs.discard(id(graph))
                if not self._graphs:
                    self._restore()
            end(graph)

        return capture_end

    def _replace(self) -> None:
        torchs = torch.nn.Linear.forward
        if self._torchs is None and torchs.__module__ == _HOME:
            self._torchs = torchs
            torch.nn.Linear.forward = self._forward(torchs)  # type: ignore[method-assign]

    def _restore(self) -> None:
        if self._torchs is not None:
            torch.nn.Linear.forward = self._torchs  # type: ignore[method-assign]
            self._torchs = None

    def _forward(self, torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
            found = None
            if layer.bias is not None and not torch.compiler.is_compiling():
                found = self._product(input, layer.weight, layer.bias)
            return torchs(layer, input) if found is None else found

        return forward

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
        result = run_biased(x, weight, bias, None) if is_captured(x) else None
        if result is not None:
            with self._lock:
                self.ours += 1
        return result
