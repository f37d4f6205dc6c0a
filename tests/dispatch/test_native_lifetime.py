"""Lifetimes in the native table: limits, threads and memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from outblas.runtime import native
from support.native_fixture import (  # noqa: F401
    BOXES,
    FakeCuda,
    Host,
    K,
    M,
    N,
    built_fixture,
    cuda_fixture,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    run_while_forgetting,
    table_fixture,
    torch,
)

pytestmark = needs_compiler


# -- torch's products, forgetting, limits ----------------------------------------------------------------


def test_a_product_that_is_torchs_goes_to_torch(table: Any, cuda: FakeCuda) -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    out = torch.empty(5, 3)
    learn(table, a, b, None), learn(table, a, b, out)
    assert torch.equal(table.matmul(a, b, None, False), a @ b)
    assert table.matmul(a, b, out, False) is out and torch.equal(out, a @ b)
    assert len(cuda) == 0
    shared = torch.zeros(7, 7)
    learn(table, shared, shared.clone(), torch.empty(7, 7))
    assert table.matmul(shared, shared.clone(), shared, False) is None
    empty = torch.empty(0, 7)
    learn(table, empty, b, None)
    assert table.matmul(empty, b, None, False) is None  # has no address


def test_an_error_of_torch_is_torchs(table: Any) -> None:
    a, b = torch.randn(5, 7), torch.randn(6, 3)
    learn(table, a, b, None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        table.matmul(a, b, None, False)


def test_all_is_forgotten_at_once(table: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared()), learn(table, a, b, None, prepared())
    table.forget()
    assert table.matmul(a, b, out, False) is None and table.matmul(a, b, None, False) is None
    assert table.counts()["remembered"] == 0


def test_every_call_keeps_its_own_answer_and_the_table_its_limit(table: Any, cuda: FakeCuda) -> None:
    count = 300
    tensors = [operands(m=m) for m in range(1, count + 1)]
    for m, (a, b, out) in enumerate(tensors, 1):
        assert learn(table, a, b, out, prepared(2 * m))
    for m, (a, b, out) in enumerate(tensors, 1):
        assert table.matmul(a, b, out, False) is out and cuda[-1].function == 2 * m
    a, b, out = operands()
    for width in range(1, 4098 - count):  # 4096 calls fit; the next one starts afresh
        assert learn(table, a.as_strided((1, 1), (width, 1)), b, None)
        assert table.counts()["remembered"] == (count + width if width < 4097 - count else 1)
    assert table.matmul(*tensors[0], False) is None


def test_a_bad_launch_is_refused(table: Any) -> None:
    a, b, out = operands()
    for launch in ((1, 2), 7, prepared(maps=BOXES[:2]), prepared(maps=((1, 2),) * 3), prepared(output=None)):
        with pytest.raises((TypeError, ValueError)):
            learn(table, a, b, out, launch)
    with pytest.raises(TypeError):
        table.matmul(a, b)
    assert table.counts()["remembered"] == 0


# -- threads and memory ----------------------------------------------------------------------------------


def test_threads_do_not_disturb_each_other(table: Any, cuda: FakeCuda, built: tuple[Any, Path]) -> None:
    """Each with sizes and a stream of its own, while another makes the table forget and learn again."""
    sets = {1000 + m: operands(m=m) for m in range(1, 9)}
    calls = 400

    def work(own: Any, stream: int) -> None:
        a, b, out = sets[stream]
        m = len(a)
        for _ in range(calls):
            while own.matmul(a, b, out, False) is None:
                learn(own, a, b, out, prepared(2 * m, extents=(m, N, K)))

    run_while_forgetting(cuda, sets, work)
    assert len(cuda) == calls * len(sets)
    for index in range(len(cuda)):
        made = cuda[index]
        m = made.function // 2
        assert made.stream == 1000 + m and list(made.extents) == [m, N, K]
        assert list(made.addresses) == [t.data_ptr() for t in sets[made.stream]]


@pytest.mark.parametrize("kind", ["out", "no out", "miss", "torch", "watched", "overlap"])
def test_thousands_of_calls_keep_nothing(table: Any, kind: str) -> None:
    a, b, out = operands(n=K) if kind == "overlap" else operands()
    out = torch.zeros(M, K, dtype=a.dtype) if kind == "overlap" else out
    learn(table, a, b, None if kind in ("no out", "torch") else out, None if kind == "torch" else prepared())
    arguments = {"no out": (a, b, None), "miss": (a, b.contiguous(), out), "torch": (a, b, None), "overlap": (a, b, a)}
    call = arguments.get(kind, (a, b, out))
    if kind == "watched":
        a.requires_grad_()
    calls = 2_000 if kind == "torch" else 5_000
    for _ in range(10):
        table.matmul(*call, False)
    watched = [*call[:2], out, torch.float16, out.device, table]
    gc.collect()
    before = [sys.getrefcount(x) for x in (None, *watched)]
    tracemalloc.start()
    begin = tracemalloc.get_traced_memory()[0]
    for _ in range(calls):
        table.matmul(*call, False)
    grown = tracemalloc.get_traced_memory()[0] - begin
    tracemalloc.stop()
    after = [sys.getrefcount(x) for x in (None, *watched)]
    assert all(abs(y - x) < 100 for x, y in zip(before, after, strict=True)), (before, after)
    assert grown < 10_000


def test_a_table_gives_all_back(table: Any, built: tuple[Any, Path], cuda: FakeCuda) -> None:
    a, b, out = operands()
    marker = object()
    before = sys.getrefcount(marker)
    for _ in range(200):
        made, reason = native.open_table(cuda.path, **{**Host().hooks(), "refused": marker})
        assert made is not None, reason
        for _ in range(5):
            learn(made, a, b, None, prepared())
            made.matmul(a, b, None, False)
            made.forget()
    del made
    gc.collect()
    assert sys.getrefcount(marker) == before
