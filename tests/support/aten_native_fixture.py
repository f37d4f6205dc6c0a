"""Kernels in C++ for torch's products, in place on CPU tensors over a libcuda that records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.runtime import native  # noqa: E402
from support.native_fixture import (  # noqa: F401  # noqa: E402
    POINTERS,
    FakeCuda,
    built_fixture,
    cuda_fixture,
    prepared,
)
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


class Device(Served):
    """Computes what it is asked first; the recording libcuda is launched then."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.needs, self.product = POINTERS, 0, None
        self.lent: Any = torch.zeros(4096, dtype=torch.uint8)
        self.workspaces: Any = self
        self.capture = 0
        self.decided: list[Any] = []

    def decide(self, *call: Any) -> Any:
        self.decided.append(call)
        return super().decide(*call)

    def prepared(self, decision: Any, c: Any) -> Any:
        p = decision.problem
        made = prepared(self.function, extents=(p.m, p.n, p.k), workspace_bytes=self.needs)
        return (None, self.product) if self.product is not None else (made, None)

    def workspace_bytes(self, decision: Any) -> int:
        return self.needs

    def to_lend(self, stream: int, nbytes: int, device: Any, capturing: Any) -> tuple[Any, int]:
        return self.lent, self.capture


def empty(shape: Any, strides: Any, dtype: Any) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture(name="device")
def device_fixture(
    served: Served, built: tuple[Any, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    monkeypatch.delenv("OUTBLAS_NATIVE", raising=False)
    monkeypatch.setattr(native, "extension", lambda: built[0])
    monkeypatch.setattr(native, "LIBCUDA", cuda.path)
    state = Device()
    table, reason = native.open_table(cuda.path, current_stream=lambda index: 0, current_device=lambda: 0, empty=empty)
    assert table is not None, reason
    monkeypatch.setattr(device_registry, "devices", {None: state})
    monkeypatch.setattr(native_table, "table", table)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    yield state


@pytest.fixture(name="on")
def on_fixture(device: Device) -> Iterator[Override]:
    made = Override("CPU")
    made.install()
    assert made.why_python == ""
    yield made
    if made._library is not None:
        made.remove()
