"""torch.matmul as a baseline, with its switches of precision as users have them and off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.core.rivals import TORCH_FULL, BaselineCall
from outblas.runtime.full_precision import full_precision_reductions, reduction_switches


def on_current_stream(product: Callable[..., Any], problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
    """Return a call that runs ``product(a, b, out=c)`` as users call it, on torch's current stream.

    The call ignores the stream that it is given; its caller has made that stream current. Nothing runs before the call.

    Args:
        a: first argument, (M, K).
        b: B as stored. For layout TN, (N, K), ``product`` gets ``b.t()``; for NN, (K, N), ``b`` itself.
        c: passed as ``out``, (M, N).
    """
    right = b.t() if problem.layout == "TN" else b

    def call(stream: int) -> None:
        product(a, right, out=c)

    return call


class TorchMm:
    """Baseline "torch": ``torch.mm(a, b, out=c)`` as users call it, on the given stream.

    ``detail(problem)`` has torch's version and the values of its switches of reduced precision. For accumulator fp16,
    ``bind`` raises DeviceError before torch 2.7.
    """

    name = "torch"

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._streams: dict[int, Any] = {}

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        import torch

        right = b.t() if problem.layout == "TN" else b
        half = problem.acc == "fp16"
        if half and not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
            raise DeviceError(
                f"torch {torch.__version__} cannot accumulate in fp16", "torch >= 2.7", "omit this baseline"
            )

        def call(stream: int) -> None:
            with torch.cuda.stream(self._stream(stream)), _fp16_accumulation(half):
                torch.mm(a, right, out=c)

        return call

    def detail(self, problem: Problem) -> str:
        """Return torch's version and its switches of precision in one line.

        Example: ``torch 2.11.0 allow_fp16_reduced_precision_reduction=True
        allow_bf16_reduced_precision_reduction=True``.
        """
        import torch

        return f"torch {torch.__version__} {' '.join(f'{name}={on}' for name, on in self._switches().items())}"

    def _switches(self) -> dict[str, bool]:
        return reduction_switches()

    def _stream(self, handle: int) -> Any:
        import torch

        if handle not in self._streams:
            self._streams[handle] = torch.cuda.ExternalStream(handle, device=self._gpu)
        return self._streams[handle]


class TorchFull(TorchMm):
    """``torch.mm`` with both ``allow_*_reduced_precision_reduction`` off: partial sums of a split K stay fp32."""

    name = TORCH_FULL

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        inner = super().bind(problem, a, b, c)

        def call(stream: int) -> None:
            with full_precision_reductions():
                inner(stream)

        return call

    def _switches(self) -> dict[str, bool]:
        with full_precision_reductions():
            return reduction_switches()


class TorchOnCurrentStream(TorchMm):
    """Baseline "torch", as :class:`TorchMm`, but on torch's current stream.

    The caller must have made the stream that it passes to the call current. For accumulator fp16 it is as
    :class:`TorchMm`.
    """

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        import torch

        if problem.acc == "fp16":  # a switch is set around every call
            return super().bind(problem, a, b, c)
        return on_current_stream(torch.mm, problem, a, b, c)


@contextlib.contextmanager
def _fp16_accumulation(wanted: bool) -> Iterator[None]:
    """torch's global switch, set for one call only."""
    if not wanted:
        yield
        return
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_accumulation
    settings.allow_fp16_accumulation = True
    try:
        yield
    finally:
        settings.allow_fp16_accumulation = before
