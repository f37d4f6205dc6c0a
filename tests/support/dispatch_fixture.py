"""A library of one problem, for tests of the dispatch and of what it keeps of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch.decide import Operand
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow

PLAIN, DEPENDENT = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True)
SCALAR = Sm80MmaConfig(64, 64, vec=1)
TUNED = Problem(64, 128, 256)
LIBRARY = Library(
    "h200",
    (
        LibraryRow(
            TUNED, "lt_auto", "", "cuda:0", LibraryChoice(PLAIN, 1.2, 1.1, 1.3), LibraryChoice(DEPENDENT, 1.4, 1.3, 1.5)
        ),
        LibraryRow(Problem(64, 128, 256, "NN", "bf16"), "torch", plain=LibraryChoice(SCALAR, 1.2, 1.1, 1.3)),
        LibraryRow(Problem(128, 128, 256), "lt_auto"),
        LibraryRow(Problem(63, 127, 255), "lt_auto", plain=LibraryChoice(PLAIN, 1.2, 1.1, 1.3)),
        LibraryRow(Problem(64, 1, 256, "NN"), "lt_auto", plain=LibraryChoice(SCALAR, 1.2, 1.1, 1.3)),
    ),
)


def rows(m: int, n: int, dtype: str = "fp16", offset: int = 0) -> Operand:
    return Operand((m, n), (n, 1), dtype, "cuda:0", offset)


def transposed(operand: Operand) -> Operand:
    return operand._replace(shape=operand.shape[::-1], strides=operand.strides[::-1])


A, WEIGHT = rows(64, 256), transposed(rows(128, 256))


class FakeTensor:
    """An address, and its transpose."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def t(self) -> FakeTensor:
        return self


class FakeCall:
    def __init__(self, log: list[tuple[Any, ...]], *tensors: FakeTensor) -> None:
        self.log, self.addresses = log, [t.data_ptr() for t in tensors]
        self.operands = tensors

    def release(self) -> None:
        self.operands = ()

    def __call__(self, stream: int) -> None:
        self.log.append((*self.addresses, stream))


class FakeKernel:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.bound = log, list[FakeCall]()

    def bind(self, problem: Problem, a: FakeTensor, b: FakeTensor, c: FakeTensor) -> FakeCall:
        self.bound.append(FakeCall(self.log, a, b, c))
        return self.bound[-1]


@pytest.fixture(name="launches")
def launches_fixture() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture(name="kernel")
def kernel_fixture(launches: list[tuple[Any, ...]]) -> FakeKernel:
    return FakeKernel(launches)
