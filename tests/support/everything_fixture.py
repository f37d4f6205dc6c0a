"""A GPU whose library has a kernel for every product that a kernel may have, whatever the package ships.

Operands are small whole numbers, so that sums in fp32 are exact, and a right result is the one that is nearest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch import device_registry, enable, native_table
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime import native
from outblas.runtime.device import gpu_of_device
from outblas.runtime.kernel_loader import load_kernel

torch = pytest.importorskip("torch")

PLAIN = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SCALAR = Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1)


class Everything(Library):
    """The fast kernel where it is legal, else the one of scalar loads, else torch."""

    def lookup(self, problem: Problem) -> LibraryRow:
        legal = [config for config in (PLAIN, SCALAR) if not why_illegal(problem, config, gpu_of_device(0))]
        return LibraryRow(problem, "torch", plain=LibraryChoice(legal[0], 1.2, 1.1, 1.3) if legal else None)


class Counted(DeviceState):
    """Counts the products that OutBLAS computes and that were decided in Python."""

    ran = 0

    def run(self, decision: Any, a: Any, b: Any, out: Any) -> Any:
        result = super().run(decision, a, b, out)
        self.ran += result is not None
        return result


@contextlib.contextmanager
def sums_in_fp32() -> Iterator[None]:
    """torch's products add up in fp32, too. (monkeypatch cannot set these: they are in no __dict__.)"""
    settings, before = torch.backends.cuda.matmul, {}
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        before[name] = getattr(settings, name)
        setattr(settings, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@pytest.fixture(name="gpus", params=["native", "python"])
def gpus_fixture(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Counted]]:
    """The states of all GPUs, which calls reach by the native table, too, or never."""
    gpu = gpu_of_device(0)
    if gpu.arch != 90:
        pytest.skip("the kernels are Hopper's")
    if request.param == "native" and native.why_not():
        pytest.skip(native.why_not())
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.init()
    states = [
        Counted(gpu, Everything(gpu.name, (LibraryRow(Problem(8, 8, 8)),)), load_kernel)
        for _ in range(torch.cuda.device_count())
    ]
    monkeypatch.setattr(device_registry, "devices", dict(enumerate(states)))
    reason = "" if request.param == "native" else "left out by this test"
    monkeypatch.setenv("OUTBLAS_NATIVE", str(int(request.param == "native")))
    monkeypatch.setattr(enable, "_switch", enable.Switch("CUDA", enable.why_not))  # counts from the start
    for name, value in (("table", None), ("why_no_table", reason), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    with sums_in_fp32():
        yield states
        torch.cuda.synchronize()


def computed(states: list[Counted]) -> int:
    """Return the number of products that OutBLAS has computed."""
    table = 0 if native_table.table is None else native_table.table.counts()["launches"]
    override = enable._switch._override
    products = 0 if override is None or override._products is None else override._products.counts()["ours"]
    return int(table) + int(products) + sum(state.ran for state in states)


def numbers(*shape: int, dtype: Any = torch.float16, seed: int = 0, grad: bool = False, device: Any = "cuda") -> Any:
    """Whole numbers from -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype).requires_grad_(grad)


def exact(a: Any, b: Any) -> Any:
    """The product in fp64, rounded once."""
    return torch.matmul(a.detach().double(), b.detach().double()).to(a.dtype)
