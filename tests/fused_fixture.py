"""Fused kernels of the device of :mod:`served_fixture`: computed on the CPU, in fp32 with one rounding in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outblas import affine, dispatch, fused
from outblas.epilogue import Epilogue
from outblas.fused_launch import Extra
from outblas.problem import Problem
from outblas.verify_fused import activated
from served_fixture import Served

torch = pytest.importorskip("torch")


class OnTheHost:
    """Stands in for a kernel: ``compute(product in fp64, bias, residual)`` gives C's values."""

    def __init__(self, epilogue: Epilogue, compute: Callable[[Any, Any, Any], Any] | None = None) -> None:
        self.epilogue = epilogue
        self._compute = compute or self._right

    def _right(self, sums: Any, bias: Any, residual: Any) -> Any:
        z = sums if bias is None else sums + bias.float()
        y = activated(z.float(), self.epilogue)
        return y if residual is None else y + residual.float()

    def bind(self, problem: Problem, operands: tuple[Any, Any, Any], extra: Extra, workspace: Any = None) -> Any:
        a, b, c = operands

        def call(stream: int) -> None:
            right = b.t() if problem.layout == "TN" else b
            sums = (a.double().unsqueeze(2) * right.double()).sum(1)  # by no product of torch's, which may be ours
            c.copy_(self._compute(sums.float(), *extra))

        call.release = lambda: None  # type: ignore[attr-defined]
        return call


@pytest.fixture(name="host")
def host_fixture(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[fused.FusedState]:
    """A device of the CPU whose fused kernels are :class:`OnTheHost`'s."""
    state = fused.FusedState(lambda problem, config, epilogue: None, lambda cubin, c, e: OnTheHost(e))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(fused, "_states", {None: state})
    monkeypatch.setattr(dispatch._devices[None], "current", lambda index: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(fused, "_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(affine.FUSED, raising=False)
    yield state
