"""A device that serves CPU tensors: the dispatch decides as on a GPU, and torch's CPU product stands in for the kernel.

Operands are small whole numbers, so that every product is exact in half precision: results are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.decide import Decision
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from support.gpus.known import H200

torch = pytest.importorskip("torch")

#: Takes every extent and alignment.
ANY = Sm80MmaConfig(64, 64, vec=1)


class Everything(Library):
    """A library that has a kernel for whatever it is asked."""

    def lookup(self, problem: Problem) -> LibraryRow:
        return LibraryRow(problem, "lt_auto", plain=LibraryChoice(ANY, 1.2, 1.1, 1.3))


class Served(DeviceState):
    """Counts what it computes."""

    def __init__(self) -> None:
        super().__init__(H200, Everything("h200", (LibraryRow(Problem(8, 8, 8)),)), self._never)
        self.ran: list[Problem] = []

    @staticmethod
    def _never(problem: Problem, config: Any) -> Any:
        raise AssertionError("no kernel is loaded here")

    def run(self, decision: Decision, a: Any, b: Any, out: Any) -> Any:
        assert decision.problem is not None
        self.ran.append(decision.problem)
        c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype) if out is None else out
        x, y = (t.detach().double().numpy() for t in (a, b))  # not by torch, whose products may be ours
        return c.copy_(torch.from_numpy(x @ y))


@pytest.fixture(name="served")
def served_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    state = Served()
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_registry, "devices", {None: state})
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, value in (("table", None), ("why_no_table", "left out"), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    yield state


def numbers(*shape: int, dtype: Any = torch.float16, seed: int = 0, grad: bool = False) -> Any:
    """Whole numbers from -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype).requires_grad_(grad)
