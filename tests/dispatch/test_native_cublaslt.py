"""The native table's entries of cuBLASLt."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.cublas import WORKSPACE_BYTES, Algo
from outblas.runtime.cublaslt import LtAlgorithm
from support.native_fixture import (  # noqa: F401
    ADDRESS,
    NEED,
    FakeCuda,
    Host,
    K,
    M,
    N,
    algorithm,
    built_fixture,
    cuda_fixture,
    fake_plan,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    table_fixture,
)

pytestmark = needs_compiler


def test_a_product_of_cublaslt_is_the_one_that_was_prepared(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, out = operands()
    assert learn(table, a, b, out, product=algorithm(cuda))
    host.stream = (1 << 63) + 9
    assert table.matmul(a, b, out, False) is out and out._version == 1
    assert (table.counts()["remembered"], table.counts()["launches"]) == (1, 1) and len(cuda) == 0
    (made,) = cuda.products
    assert (made.handle, made.descriptor, made.Adesc, made.Bdesc, made.Cdesc, made.Ddesc) == (11, 12, 13, 14, 15, 15)
    # Column by column the first operand is our B, and the second our A.
    assert (b.data_ptr(), a.data_ptr(), out.data_ptr(), out.data_ptr()) == (made.A, made.B, made.C, made.D)
    assert (made.alpha, made.beta, made.workspace, made.bytes, made.stream) == (1.0, 0.0, 0, 0, (1 << 63) + 9)
    assert bytes(made.algo) == bytes(range(64))


def test_descriptors_end_with_their_last_user(table: Any, cuda: FakeCuda) -> None:
    plan = fake_plan(cuda, Problem(M, N, K))
    ended = plan._owner.ended  # type: ignore[attr-defined]
    a, b, out = operands()
    assert learn(table, a, b, out, product=algorithm(cuda, keep=plan))
    del plan
    assert table.matmul(a, b, out, False) is out and ended == []
    table.forget()
    assert sorted(ended) == [1, 2, 3, 4]


def test_an_output_is_allocated_where_none_is_given(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, _ = operands()
    learn(table, a, b, None, product=algorithm(cuda))
    made = [table.matmul(a, b, None, False) for _ in range(2)]
    assert [p.D for p in cuda.products] == [t.data_ptr() for t in made] and made[0].shape == (M, N)
    host.device = 1
    assert table.matmul(a, b, None, False) is None and len(cuda.products) == 2


def test_a_refusal_of_cublaslt_is_an_error(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, product=algorithm(cuda))
    cuda.set("fake_blas_status", 15)
    for _ in range(2):
        with pytest.raises(DeviceError, match="cublasLtMatmul failed with CUBLAS_STATUS_NOT_SUPPORTED"):
            table.matmul(a, b, out, False)
    assert out._version == 0 and table.counts()["launches"] == 0
    cuda.library.fake_reset()
    assert table.matmul(a, b, out, False) is out


def test_another_context_is_left_to_the_dispatch(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, product=algorithm(cuda))
    cuda.set("fake_context", 78, ctypes.c_uint64)
    assert table.matmul(a, b, out, False) is None and not cuda.products


def test_what_cannot_be_called_is_refused(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    good = algorithm(cuda)
    for bad in (
        good._replace(algo=b"short"),
        good._replace(numbers=(0, *good.numbers[1:])),
        good._replace(numbers=good.numbers[:-1]),
        good._replace(workspace_bytes=COUNTERS_BYTES),
        good._replace(output=None),  # type: ignore[arg-type]
        7,
    ):
        with pytest.raises((TypeError, ValueError)):
            learn(table, a, b, out, product=bad)
    assert table.counts()["remembered"] == 0


@pytest.mark.parametrize("needs", [False, True])
def test_the_call_is_that_of_the_python_path_byte_for_byte(table: Any, cuda: FakeCuda, host: Host, needs: bool) -> None:
    problem = Problem(M, N, K)
    a, b, out = operands()
    made = LtAlgorithm(problem, fake_plan(cuda, problem), Algo((ctypes.c_uint64 * 8)(*range(8))), needs, 77)
    space: Any = SimpleNamespace(data_ptr=lambda: ADDRESS)
    made(a, b, out, host.stream, space)
    learn(table, a, b, out, product=made.prepared(out))
    table.lend(a, host.stream, ADDRESS, 2 * NEED, space)
    assert table.matmul(a, b, out, False) is out
    theirs, mine = cuda.products
    assert bytes(theirs) == bytes(mine) and mine.alpha == 1.0
    assert (mine.workspace, mine.bytes) == ((ADDRESS + COUNTERS_BYTES, WORKSPACE_BYTES) if needs else (0, 0))
